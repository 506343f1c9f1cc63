"""The run folder: written once, read again, judged, its page."""
