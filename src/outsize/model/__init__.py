"""Recording a module as a program, slicing it, and what each part costs."""
