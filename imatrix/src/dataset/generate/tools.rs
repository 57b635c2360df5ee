//! Requests that need a tool, answered by a call in the model's own syntax (DSML), some with the tool's result behind.

use super::words::{CITIES, GOODS, NAMES};
use super::{Random, Task};

/// Name, what it does, parameters as `(name, JSON type)`.
type Tool = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const TOOLS: &[Tool] = &[
    ("get_weather", "Weather of a city on a day", &[("city", "string"), ("day", "string")]),
    (
        "search_stock",
        "How many of an article are in a warehouse",
        &[("article", "string"), ("warehouse", "string")],
    ),
    ("book_room", "Books a meeting room", &[("room", "string"), ("hour", "integer"), ("people", "integer")]),
    (
        "send_message",
        "Sends a message to a person",
        &[("to", "string"), ("text", "string"), ("urgent", "boolean")],
    ),
    ("convert_currency", "Converts an amount", &[("amount", "number"), ("from", "string"), ("to", "string")]),
    (
        "read_file",
        "Reads lines of a file",
        &[("path", "string"), ("first_line", "integer"), ("last_line", "integer")],
    ),
    ("run_query", "Runs a read-only SQL query", &[("sql", "string"), ("limit", "integer")]),
    ("plan_route", "Plans a journey", &[("start", "string"), ("end", "string"), ("avoid", "array")]),
];
const FRAME: &str = "You can call the tools below. To call some, write one block of this form:\n\n\
    <｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"TOOL\">\n<｜DSML｜parameter name=\"PARAMETER\" string=\"true|false\">VALUE\
    </｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\nWith string=\"true\" the value is plain text, with \
    string=\"false\" it is JSON. Results come back as <tool_result>.\n\nTheir JSON schemas:\n";
const OPENINGS: &[&str] =
    &["Please ", "Could you ", "I need you to ", "Quickly: ", "When you have a moment, ", "Can you "];
const DAYS: &[&str] = &["today", "tomorrow", "on Monday", "on Thursday", "on Saturday", "next week"];
const CURRENCIES: &[&str] = &["EUR", "USD", "JPY", "CHF", "SEK", "INR"];
const ROOMS: &[&str] = &["Aspen", "Birch", "Cedar", "Dogwood", "Elm", "Fir"];
const FILES: &[&str] =
    &["src/main.rs", "config/server.toml", "docs/setup.md", "lib/parser.py", "tests/api_test.go"];

/// What the user says, the call's arguments in order, and what the tool answers.
struct Request {
    tool: usize,
    wish: String,
    /// Value and whether it is written as text.
    arguments: Vec<(String, bool)>,
    result: String,
    reply: String,
}

fn text(value: impl Into<String>) -> (String, bool) {
    (value.into(), true)
}

fn json(value: impl ToString) -> (String, bool) {
    (value.to_string(), false)
}

fn request(random: &mut Random) -> Request {
    let (name, city, goods, day) =
        (random.pick(NAMES), random.pick(CITIES), random.pick(GOODS), random.pick(DAYS));
    let (small, large) = (random.between(2, 16), random.between(17, 980));
    let tool = random.below(TOOLS.len());
    let (wish, arguments, result, reply) = match tool {
        0 => (
            format!("tell me what the weather in {city} will be {day}."),
            vec![text(city), text(day)],
            format!("{{\"temperature\": {small}, \"rain\": {}}}", large % 2 == 0),
            format!(
                "In {city} it will be {small} degrees {day}{}.",
                if large % 2 == 0 { ", with rain" } else { " and dry" }
            ),
        ),
        1 => (
            format!("check how many {goods} we have left in {city}."),
            vec![text(goods), text(city)],
            format!("{{\"count\": {large}}}"),
            format!("There are {large} {goods} in the {city} warehouse."),
        ),
        2 => {
            let room = random.pick(ROOMS);
            (
                format!("book the room {room} at {small} o'clock for {} people.", large % 30 + 2),
                vec![text(room), json(small), json(large % 30 + 2)],
                "{\"booked\": true}".to_owned(),
                format!("The room {room} is booked for {small} o'clock."),
            )
        }
        3 => (
            format!("let {name} know that the {goods} arrive in {city} {day}."),
            vec![text(name), text(format!("The {goods} arrive in {city} {day}.")), json(large % 2 == 0)],
            "{\"sent\": true}".to_owned(),
            format!("I have told {name}."),
        ),
        4 => {
            let (from, to) = (random.pick(CURRENCIES), random.pick(CURRENCIES));
            (
                format!("say how much {large} {from} are in {to}."),
                vec![json(large), text(from), text(to)],
                format!("{{\"amount\": {}}}", large * small),
                format!("{large} {from} are {} {to}.", large * small),
            )
        }
        5 => {
            let path = random.pick(FILES);
            (
                format!("show me lines {small} to {large} of {path}."),
                vec![text(path), json(small), json(large)],
                format!("{{\"lines\": {}}}", large - small + 1),
                format!("Here are the {} lines of `{path}`.", large - small + 1),
            )
        }
        6 => (
            format!("find the {small} largest orders of {goods} shipped to {city}."),
            vec![
                text(format!(
                    "SELECT * FROM orders WHERE article = '{goods}' AND city = '{city}' ORDER BY amount DESC"
                )),
                json(small),
            ],
            format!("{{\"rows\": {small}, \"largest\": {large}}}"),
            format!("The largest of the {small} orders is for {large} {goods}."),
        ),
        _ => {
            let other = random.pick(CITIES);
            (
                format!("plan a journey from {city} to {other} {day} without motorways and tolls."),
                vec![text(city), text(other), json("[\"motorway\", \"toll\"]")],
                format!("{{\"kilometres\": {large}, \"hours\": {small}}}"),
                format!("The journey is {large} km long and takes about {small} hours."),
            )
        }
    };
    Request { tool, wish, arguments, result, reply }
}

fn schema((name, description, parameters): &Tool) -> String {
    let properties: Vec<_> =
        parameters.iter().map(|(name, kind)| format!("\"{name}\": {{\"type\": \"{kind}\"}}")).collect();
    format!(
        "{{\"name\": \"{name}\", \"description\": \"{description}\", \"parameters\": {{\"type\": \"object\", \
         \"properties\": {{{}}}}}}}",
        properties.join(", ")
    )
}

fn call(request: &Request) -> String {
    let (name, _, parameters) = TOOLS[request.tool];
    let arguments = parameters.iter().zip(&request.arguments).map(|((name, _), (value, is_text))| {
        format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
    });
    format!(
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"{name}\">\n{}</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        arguments.collect::<String>()
    )
}

pub(super) fn task(random: &mut Random) -> Task {
    let request = request(random);
    let mut offered: Vec<usize> = (0..TOOLS.len()).filter(|&tool| tool != request.tool).collect();
    random.shuffle(&mut offered);
    offered.truncate(random.between(1, 4) as usize);
    offered.push(request.tool);
    random.shuffle(&mut offered);
    let schemas: Vec<_> = offered.iter().map(|&tool| schema(&TOOLS[tool])).collect();
    let (name, description, _) = TOOLS[request.tool];
    let then = (random.below(2) == 0)
        .then(|| (format!("<tool_result>{}</tool_result>", request.result), request.reply.clone()));
    Task {
        system: format!("## Tools\n\n{FRAME}\n{}", schemas.join("\n")),
        user: format!("{}{}", random.pick(OPENINGS), request.wish),
        reasoning: format!(
            "The request needs `{name}`: {}. All its parameters are in the message, so I can call it at once.",
            description.to_lowercase()
        ),
        answer: format!("\n\n{}", call(&request)),
        then,
    }
}
