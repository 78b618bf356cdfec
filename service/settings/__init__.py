"""All settings: their fields, where their values come from, and how they are checked and shown."""
