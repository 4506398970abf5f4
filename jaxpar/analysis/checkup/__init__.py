"""``jaxpar check``: findings about a layout and its compiled step, as text and as an HTML page."""
