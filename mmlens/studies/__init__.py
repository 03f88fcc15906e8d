"""Published studies, end to end."""
