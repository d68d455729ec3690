"""What all dialects of chats share: messages, calls, prompts, and answers as they come."""
