"""Models that use jaxpar as any user's code would: public names only."""
