"""The prompts of the golden values: varied scripts, formats and lengths. Text only."""

from __future__ import annotations

_GETTYSBURG = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in \
Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so \
dedicated, can long endure. We are met on a great battle-field of that war. We have come to dedicate a \
portion of that field, as a final resting place for those who here gave their lives that that nation might \
live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. \
The brave men, living and dead, who struggled here, have consecrated it, far above our poor power to add or \
detract. The world will little note, nor long remember what we say here, but it can never forget what they \
did here. It is for us the living, rather, to be dedicated here to the unfinished work which they who fought \
here have thus far so nobly advanced."""

_ACCESS_CODES = "".join(
    f"The access code of room {room} is {(room * 7919 + 104729) % 9000 + 1000}.\n" for room in range(100, 150)
)

_STOCK_TABLE = "| item | shelf | count |\n| --- | --- | --- |\n" + "".join(
    f"| {name} {size} | {chr(65 + index % 6)}{index * 3 % 17} | {index * 37 % 101} |\n"
    for index, (name, size) in enumerate(
        (name, size)
        for name in ("bolt", "washer", "hinge", "bracket", "screw", "nail", "clamp", "spring")
        for size in ("small", "medium", "large", "extra large")
    )
)

TEXTS: dict[str, str] = {
    "plain": "The capital of France is",
    "single_token": "Once",
    "single_newline": "\n",
    "leading_spaces": "   indented and  double  spaced",
    "digits": "Count by threes: 3, 6, 9, 12, 15, 18, 21, 24,",
    "long_number": "The first digits of pi are 3.14159265358979323846264338327950288419716939937510",
    "python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n',
    "rust": "fn main() {\n    let numbers = vec![1, 2, 3, 4];\n    let sum: i32 = numbers.iter()",
    "json": '{"name": "Ada Lovelace", "born": 1815, "languages": ["English", "French"], "occupation":',
    "sql": "SELECT users.name, COUNT(*) AS orders FROM users JOIN orders ON",
    "html": "<!DOCTYPE html>\n<html>\n<head>\n  <title>My garden</title>\n</head>\n<body>\n",
    "markdown": "# Shopping list\n\n- apples\n- bread\n- ",
    "tabs": "name\tage\tcity\nAnna\t31\tOslo\nBob\t27\t",
    "mathematics": "Let f(x) = x² + 3x − 5. Then f′(x) = 2x + 3, and ∫ f(x) dx =",
    "chinese": "北京是中国的首都。上海是",
    "japanese": "むかしむかし、あるところに、おじいさんと",
    "korean": "대한민국의 수도는 서울이며,",
    "russian": "Москва — столица России. Санкт-Петербург",
    "arabic": "القاهرة هي عاصمة مصر، و",
    "hindi": "भारत की राजधानी नई दिल्ली है और",
    "greek": "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας και",
    "thai": "กรุงเทพมหานครเป็นเมืองหลวงของ",
    "german": "Die Bundesrepublik Deutschland ist ein Staat in Mitteleuropa. Ihre größte Stadt",
    "emoji": "I love pizza 🍕🍕 and my family 👨‍👩‍👧‍👦! 🎉 Party time",
    "accents": "Café, naïve, coöperate, Ångström, façade, piñata:",
    "speech": _GETTYSBURG,
    "access_codes": _ACCESS_CODES + "The access code of room 137 is",
    "table": _STOCK_TABLE + "| nut small |",
}

CHATS: dict[str, list[dict[str, str]]] = {
    "chat_capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "My name is Grace and I like sailing."},
        {"role": "assistant", "content": "Nice to meet you, Grace! Sailing is a wonderful hobby."},
        {"role": "user", "content": "What is my name?"},
    ],
    "chat_code": [{"role": "user", "content": "Write a Python function that reverses a string."}],
    "chat_emoji": [{"role": "user", "content": "Tell me a story with emoji 🐱🚀 in 中文 and English."}],
}
