"""``check``: findings about a layout and its compiled program, as text and as a page."""
