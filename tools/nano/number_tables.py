"""Tables of our own: CSV, markdown and fixed-width tables whose numbers follow a rule that can be learned in part."""
import datetime, math, random

CITIES = ["Aarhus", "Bergen", "Cadiz", "Dijon", "Essen", "Fermo", "Ghent", "Haifa", "Izmir", "Jaen", "Kyoto", "Lille", "Malmo", "Nantes", "Oslo",
          "Porto", "Quito", "Riga", "Split", "Turin", "Utrecht", "Vigo", "Warsaw", "Xanthi", "York", "Zagreb"]
NAMES = ["Ada", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leo", "Maria", "Nils", "Olga", "Paul", "Rosa", "Simon", "Tilda", "Viktor"]
GOODS = ["apple", "bolt", "candle", "drill", "envelope", "file", "glove", "hammer", "ink", "jar", "kettle", "lamp", "mug", "nail", "oil", "pencil", "rope", "screw", "towel", "valve"]


def emit(rng, header, rows):
    """The same rows as CSV, as a markdown table or as aligned columns."""
    rows = [[str(c) for c in r] for r in rows]
    style = rng.randrange(3)
    if style == 0: return "\n".join([",".join(header), *(",".join(r) for r in rows)]) + "\n"
    if style == 1:
        numeric = [all(r[i].replace(".", "").replace("-", "").isdigit() for r in rows) for i in range(len(header))]
        return "\n".join(["| " + " | ".join(header) + " |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|",
                          *("| " + " | ".join(r) + " |" for r in rows)]) + "\n"
    width = [max(len(header[i]), *(len(r[i]) for r in rows)) for i in range(len(header))]
    line = lambda r: "  ".join(c.rjust(w) for c, w in zip(r, width)).rstrip()
    return "\n".join([line(header), "  ".join("-" * w for w in width), *map(line, rows)]) + "\n"


def invoice(rng):
    rows, total = [], 0
    for good in rng.sample(GOODS, rng.randint(5, 12)):
        n, price = rng.randint(1, 20), rng.randint(1, 40) * 5
        total += n * price; rows.append([good, n, f"{price / 100:.2f}", f"{n * price / 100:.2f}"])
    rows.append(["total", "", "", f"{total / 100:.2f}"])
    return emit(rng, ["item", "quantity", "price", "amount"], rows)


def powers(rng):
    a, step = rng.randint(1, 60), rng.randint(1, 5)
    return emit(rng, ["n", "square", "cube", "root"], [[n, n * n, n ** 3, f"{math.sqrt(n):.3f}"] for n in range(a, a + 25 * step, step)])


def products(rng):
    a, b = rng.randint(2, 19), rng.randint(1, 30)
    return emit(rng, ["a", "b", "a*b", "a+b"], [[a, n, a * n, a + n] for n in range(b, b + 20)])


def angles(rng):
    a, step = rng.randrange(0, 180, 5), rng.choice([1, 2, 5, 10])
    return emit(rng, ["degrees", "sin", "cos"], [[d, f"{math.sin(math.radians(d)):.4f}", f"{math.cos(math.radians(d)):.4f}"] for d in range(a, a + 20 * step, step)])


def calendar(rng):
    day = datetime.date(rng.randint(1990, 2029), rng.randint(1, 12), rng.randint(1, 28))
    rows = [[d.isoformat(), d.strftime("%A"), d.isocalendar()[1]] for d in (day + datetime.timedelta(days=i) for i in range(rng.randint(14, 30)))]
    return emit(rng, ["date", "weekday", "week"], rows)


def weather(rng):
    base, rows = rng.uniform(-5, 25), []
    for hour in range(24):
        t = base + 6 * math.sin((hour - 9) / 24 * 2 * math.pi) + rng.gauss(0, 0.4)
        rows.append([f"{hour:02d}:00", f"{t:.1f}", f"{t * 1.8 + 32:.1f}", max(20, min(99, round(80 - 2 * (t - base) + rng.gauss(0, 3))))])
    return f"Station {rng.choice(CITIES)}\n" + emit(rng, ["time", "celsius", "fahrenheit", "humidity"], rows)


def people(rng):
    rows = []
    for i, name in enumerate(rng.sample(NAMES, rng.randint(8, 16))):
        born = rng.randint(1940, 2005); rows.append([i + 1, name, born, 2026 - born, rng.choice(CITIES)])
    return emit(rng, ["id", "name", "born", "age", "city"], rows)


def loan(rng):
    balance, rate, pay = rng.randint(10, 200) * 100.0, rng.choice([2, 3, 4, 5, 6]), 0
    pay = round(balance * 0.06, 2); rows = []
    for month in range(1, 19):
        interest = round(balance * rate / 1200, 2); balance = round(balance + interest - pay, 2)
        if balance < 0: break
        rows.append([month, f"{interest:.2f}", f"{pay:.2f}", f"{balance:.2f}"])
    return f"Rate {rate} %\n" + emit(rng, ["month", "interest", "payment", "balance"], rows)


def server_log(rng):
    at = datetime.datetime(2026, rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 23), rng.randint(0, 59), rng.randint(0, 59))
    lines = []
    for _ in range(rng.randint(15, 30)):
        at += datetime.timedelta(seconds=rng.randint(1, 50))
        path = rng.choice(["/", "/index.html", "/docs/start.html", "/style.css", "/api/items", "/api/items/%d" % rng.randint(1, 99), "/logo.png"])
        status = rng.choices([200, 304, 404, 500], [80, 12, 6, 2])[0]
        lines.append(f"10.0.{rng.randint(0, 3)}.{rng.randint(1, 254)} [{at:%Y-%m-%dT%H:%M:%S}Z] \"GET {path}\" {status} {0 if status == 304 else rng.randint(120, 9999)}")
    return "\n".join(lines) + "\n"


def bases(rng):
    a = rng.randint(0, 4000)
    return emit(rng, ["decimal", "hex", "octal", "binary"], [[n, f"{n:#x}", f"{n:#o}", f"{n:b}"] for n in range(a, a + 20)])


def distances(rng):
    rows = []
    for _ in range(18):
        km = rng.randint(1, 900); rows.append([*rng.sample(CITIES, 2), km, f"{km * 0.621371:.1f}"])
    return emit(rng, ["from", "to", "km", "miles"], rows)


def primes(rng):
    n, rows = rng.randint(2, 3000), []
    while len(rows) < 20:
        factors, m, p = [], n, 2
        while p * p <= m:
            while m % p == 0: factors.append(p); m //= p
            p += 1
        if m > 1: factors.append(m)
        rows.append([n, " x ".join(map(str, factors)), "prime" if len(factors) == 1 else ""]); n += 1
    return emit(rng, ["n", "factors", "note"], rows)


MAKERS = [invoice, powers, products, angles, calendar, weather, people, loan, server_log, bases, distances, primes]


def documents(count, seed):
    """`count` tables, the same ones for the same seed."""
    rng = random.Random(seed)
    for _ in range(count): yield rng.choice(MAKERS)(rng)
