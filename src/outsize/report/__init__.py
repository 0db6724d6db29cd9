"""Tables, pages and timelines made from plans and runs."""
