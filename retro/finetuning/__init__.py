"""Fine-tuning on examples: instructions and conversations, and questions with passages as neighbors."""
