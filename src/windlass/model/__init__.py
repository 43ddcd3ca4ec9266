"""The network: our GPT, Hugging Face models, and their arithmetic."""
