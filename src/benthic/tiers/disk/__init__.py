"""L3: a rank's part of the durable disk floor. Rank-local; decides nothing shared; no torch."""
