"""The mechanisms, one folder for each form of parallelism. None of them knows a TrainState."""
