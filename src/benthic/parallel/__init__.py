"""Several ranks: who they are, what each computes of a step, and how they exchange rows and decisions."""
