"""The OpenAI dialect: chat completions and completions."""
