"""Fixed chats, and what models answer."""
