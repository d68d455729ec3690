"""``everstream chat``: a conversation in the terminal that can be rewound and branched."""
