"""The experts of one token: a product of a vector bound by the memory alone, in two launches."""
