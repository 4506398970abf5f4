"""MindFormers configurations: their keys, their validation rules, and what each becomes."""
