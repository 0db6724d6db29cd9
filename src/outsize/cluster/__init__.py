"""Devices, links and topology of what the job may run on."""
