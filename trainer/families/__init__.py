"""Model families, a file each: how each differs from Llama. No torch: planners ask too."""
