"""DeepSpeed configurations: ZeRO, precision, batch, optimizer and schedule."""
