"""Models on disk and where they come from: folders, wheels, the Hugging Face hub. `tinyllm.hub` resolves names."""
