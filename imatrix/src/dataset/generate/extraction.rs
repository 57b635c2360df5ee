//! Texts with facts in them, and the facts as JSON.

use super::words::{CITIES, COMPANIES, GOODS, MONTHS, NAMES};
use super::{Random, Task};

const REQUESTS: &[&str] = &[
    "Extract the fields FIELDS as JSON.",
    "Read the text below and return one JSON object with the keys FIELDS.",
    "Which values do FIELDS have here? Answer with JSON only.",
    "Fill this record from the text (JSON, keys FIELDS).",
    "Turn the message into structured data: FIELDS.",
];
const SMALL_TALK: &[&str] = &[
    "Thank you for the quick reply last week.",
    "I hope the new office is treating you well.",
    "As we said on the phone, nothing else changes.",
    "Please excuse the delay; half of the team was ill.",
    "The attachment is the same as before.",
    "If anything is unclear, call me at any time.",
];

/// A text and its facts, `(key, JSON value)`.
fn document(random: &mut Random) -> (String, Vec<(&'static str, String)>) {
    let (name, city, company, goods) =
        (random.pick(NAMES), random.pick(CITIES), random.pick(COMPANIES), random.pick(GOODS));
    let (day, month, year) = (random.between(1, 28), random.below(12), random.between(2019, 2027));
    let (count, cents) = (random.between(2, 900), random.between(100, 99999));
    let date = format!("\"{year}-{:02}-{day:02}\"", month + 1);
    let spoken = format!("{day} {} {year}", MONTHS[month]);
    let (price, quoted) = (format!("{}.{:02}", cents / 100, cents % 100), |text: &str| format!("\"{text}\""));
    match random.below(4) {
        0 => (
            format!(
                "{} {name} of {company} confirms the order of {count} {goods} for {price} euros in all. They leave \
                 {city} on {spoken}. {}",
                random.pick(SMALL_TALK),
                random.pick(SMALL_TALK)
            ),
            vec![
                ("customer", quoted(company)),
                ("contact", quoted(name)),
                ("article", quoted(goods)),
                ("count", count.to_string()),
                ("total_eur", price),
                ("ship_date", date),
            ],
        ),
        1 => (
            format!(
                "INVOICE {}\n{company}\n{city}\n\nDate: {spoken}\nItem: {goods}\nQuantity: {count}\nAmount due: EUR \
                 {price}\nContact: {name}\n",
                cents * 7 % 100_000
            ),
            vec![
                ("number", (cents * 7 % 100_000).to_string()),
                ("company", quoted(company)),
                ("date", date),
                ("amount_eur", price),
                ("contact", quoted(name)),
            ],
        ),
        2 => {
            let levels = ["WARN", "ERROR", "INFO"];
            let level = levels[random.below(3)];
            (
                format!(
                    "{year}-{:02}-{day:02}T{:02}:{:02}:07Z {level} warehouse[{count}]: scan of {goods} in {city} by \
                     {} took {} ms, limit {} ms",
                    month + 1,
                    count % 24,
                    cents % 60,
                    name.to_lowercase(),
                    cents % 5000,
                    1000
                ),
                vec![
                    ("level", quoted(level)),
                    ("process", count.to_string()),
                    ("city", quoted(city)),
                    ("milliseconds", (cents % 5000).to_string()),
                    ("over_limit", (cents % 5000 > 1000).to_string()),
                ],
            )
        }
        _ => (
            format!(
                "{name} will speak about {goods} at the {company} open day in {city}, on {spoken}, in hall {}. {} There \
                 is room for {count} guests.",
                cents % 9 + 1,
                random.pick(SMALL_TALK)
            ),
            vec![
                ("speaker", quoted(name)),
                ("topic", quoted(goods)),
                ("host", quoted(company)),
                ("city", quoted(city)),
                ("date", date),
                ("hall", (cents % 9 + 1).to_string()),
                ("seats", count.to_string()),
            ],
        ),
    }
}

pub(super) fn task(random: &mut Random) -> Task {
    let (text, facts) = document(random);
    let keys = facts.iter().map(|(key, _)| *key).collect::<Vec<_>>().join(", ");
    let lines: Vec<_> = facts.iter().map(|(key, value)| format!("  \"{key}\": {value}")).collect();
    Task {
        system: if random.below(3) == 0 {
            "You extract data. You never invent values.".into()
        } else {
            String::new()
        },
        user: format!("{}\n\n{text}", random.pick(REQUESTS).replace("FIELDS", &keys)),
        reasoning: format!(
            "I look for {} values. {}.",
            facts.len(),
            facts
                .iter()
                .map(|(key, value)| format!("The {} is {value}", key.replace('_', " ")))
                .collect::<Vec<_>>()
                .join(". ")
        ),
        answer: format!("{{\n{}\n}}", lines.join(",\n")),
        then: None,
    }
}
