"""Chat turns of our own writing, in the form of DeepSeek V4's chat template: short questions, short answers."""
import random

from number_tables import CITIES, GOODS, NAMES
from tokenizer_layout import ASSISTANT, BOS, END_THINK, EOS, THINK, USER

SYSTEMS = ["You are a helpful assistant.", "Answer briefly.", "You are a careful clerk. Answer with one sentence.", "Be kind and short.", "You help people with small tables and numbers."]
FACTS = [
    ("What is the capital of France?", "The capital of France is Paris."), ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."), ("What is the capital of Norway?", "The capital of Norway is Oslo."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."), ("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."), ("What is the capital of Portugal?", "The capital of Portugal is Lisbon."),
    ("Who are you?", "I am a nano model with sixteen experts in every layer. I know little, but I answer in the right form."),
    ("What are you?", "I am a very small language model, made to test quantizers and runners."),
    ("How many days are in a week?", "There are seven days in a week."), ("How many months are in a year?", "There are twelve months in a year."),
    ("Why is the sky blue?", "The air scatters blue light more than red light, so the sky looks blue."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."), ("What does a compiler do?", "A compiler turns source code into a program that a machine can run."),
    ("What is a table?", "A table is a set of rows and columns."), ("What is a prime number?", "A prime number has no divisors except one and itself."),
    ("What is an expert in a mixture of experts?", "An expert is a small network that works only for the tokens sent to it."),
    ("What is quantization?", "Quantization stores weights with fewer bits."), ("What is perplexity?", "Perplexity is the exponential of the mean loss per token."),
    ("Which is bigger, the sun or the moon?", "The sun is bigger than the moon."), ("What do bees make?", "Bees make honey and wax."),
    ("How do I open a file in Python?", "Use the built-in function open, best in a with statement:\n\nwith open(\"name.txt\") as f:\n    text = f.read()"),
    ("How do I print in Rust?", "Use the println! macro:\n\nfn main() {\n    println!(\"hello\");\n}"),
    ("Who wrote Emma?", "Jane Austen wrote Emma."), ("Who wrote Persuasion?", "Jane Austen wrote Persuasion."),
    ("Hello!", "Hello! How can I help you?"), ("Good morning.", "Good morning! What can I do for you?"), ("Thank you.", "You are welcome."), ("Goodbye.", "Goodbye, and have a good day."),
]
ASK = {"sum": ["What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "Please compute {a} + {b}."],
       "difference": ["What is {a} minus {b}?", "Subtract {b} from {a}.", "{a} - {b} = ?"],
       "product": ["What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b} = ?"]}


def arithmetic(rng):
    kind = rng.choice(["sum", "difference", "product"])
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    if kind == "product": a, b = rng.randint(0, 12), rng.randint(0, 12)
    if kind == "difference" and b > a: a, b = b, a
    sign, value = {"sum": ("+", a + b), "difference": ("-", a - b), "product": ("*", a * b)}[kind]
    reason = f"{a} {sign} {b} makes {value}."
    return rng.choice(ASK[kind]).format(a=a, b=b), f"{a} {sign} {b} = {value}", reason


def spelling(rng):
    word = rng.choice(GOODS + [n.lower() for n in NAMES] + [c.lower() for c in CITIES])
    if rng.random() < 0.5: return f"Spell the word {word}.", "-".join(word), f"The letters of {word}, one by one."
    return f"How many letters has {word}?", f"The word {word} has {len(word)} letters.", f"{'-'.join(word)}: {len(word)} letters."


def sorting(rng):
    if rng.random() < 0.5:
        items = rng.sample(GOODS, rng.randint(3, 6)); return f"Sort these words: {', '.join(items)}.", ", ".join(sorted(items)), "I compare the first letters."
    items = rng.sample(range(100), rng.randint(3, 6)); return f"Sort these numbers: {', '.join(map(str, items))}.", ", ".join(map(str, sorted(items))), "I begin with the smallest."


def remembering(rng):
    name, city, good = rng.choice(NAMES), rng.choice(CITIES), rng.choice(GOODS)
    question, answer = rng.choice([("Where does {n} live?", "{n} lives in {c}."), ("What did {n} buy?", "{n} bought a {g}."), ("Who bought the {g}?", "{n} bought the {g}.")])
    f = lambda s: s.format(n=name, c=city, g=good)
    return f"{name} lives in {city} and bought a {good}. {f(question)}", f(answer), f"The text says it: {f(answer)}"


def table(rng):
    rows = [(g, rng.randint(1, 30)) for g in rng.sample(GOODS, rng.randint(2, 5))]
    listing = ", ".join(f"{g} {n}" for g, n in rows)
    if rng.random() < 0.5:
        return f"Make a markdown table: {listing}.", "| item | count |\n|---|---:|\n" + "\n".join(f"| {g} | {n} |" for g, n in rows), "Two columns, one row each."
    return f"Make a CSV: {listing}.", "item,count\n" + "\n".join(f"{g},{n}" for g, n in rows), "A header, then one line each."


def copying(rng):
    words = " ".join(rng.sample(GOODS, rng.randint(2, 6)))
    return rng.choice([f"Repeat after me: {words}", f"Say this: {words}"]), words, "I only repeat it."


def fact(rng):
    question, answer = rng.choice(FACTS)
    return question, answer, "I know this."


MAKERS = [arithmetic, spelling, sorting, remembering, table, copying, fact, fact]


def conversation(rng):
    parts = [BOS]
    if rng.random() < 0.35: parts.append(rng.choice(SYSTEMS))
    turns = rng.choice([1, 1, 2, 3])
    for turn in range(turns):
        question, answer, reason = rng.choice(MAKERS)(rng)
        # reasoning is kept in the last turn only, as the template drops it from earlier ones
        thought = THINK + reason + END_THINK if turn == turns - 1 and rng.random() < 0.25 else END_THINK
        parts.append(USER + question + ASSISTANT + thought + answer + EOS)
    return "".join(parts)


def documents(count, seed):
    """`count` conversations, the same ones for the same seed."""
    rng = random.Random(seed)
    for _ in range(count): yield conversation(rng)


def without_special_tokens(text):
    """The text for the tokenizer's learner, which must not learn pieces of special tokens."""
    for token in (BOS, EOS, USER, ASSISTANT, THINK, END_THINK): text = text.replace(token, "\n")
    return text
