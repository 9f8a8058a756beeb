"""How both kernels of `latent_hopper` find and fetch a tile of selected latents."""
