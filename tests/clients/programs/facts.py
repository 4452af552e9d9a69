"""Texts to retrieve, and questions that each of them answers."""

DOCUMENTS = {
    "cat": "A cat hunts mice at night.",
    "train": "The train to Vienna leaves at nine.",
    "france": "Paris is the capital of France.",
    "bread": "Bread is baked from flour, water, salt and yeast.",
    "moon": "The moon orbits the earth in about 27 days.",
}
QUESTIONS = {
    "cat": "Which animal catches rodents?",
    "train": "When does the railway connection depart?",
    "france": "In which city is the French government?",
    "bread": "What are the ingredients of a loaf?",
    "moon": "How long does our satellite need for one revolution?",
}
