"""Images and volumes whose height, width or depth is sharded: halos, convolutions, pooling, resizing."""
