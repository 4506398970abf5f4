"""parallelize runs the train step of a single-device script on many devices: its arguments, its trace, its layout."""
