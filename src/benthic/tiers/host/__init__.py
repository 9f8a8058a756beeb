"""L2: shared slabs in host memory, and the copies between them and the device. Rank-local; decides nothing shared."""
