"""Looking at a layout before and while it runs: explanations, checks, drawings."""
