"""The sum over a token's experts, alone or with the residual addition and the norm that follow it."""
