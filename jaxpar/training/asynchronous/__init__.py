"""Steps of a pipeline that is not flushed between them."""
