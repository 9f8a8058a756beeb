"""How the decode kernels put the splits of a row's keys together where a row may have no key at all."""
