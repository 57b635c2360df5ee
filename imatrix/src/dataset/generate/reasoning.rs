//! Small problems with numbers, worked out step by step.

use super::words::{CITIES, GOODS, NAMES};
use super::{Random, Task};

const REQUESTS: &[&str] = &[
    "Solve this and show the steps.",
    "Think it through, then give the number.",
    "What is the answer? Explain shortly.",
    "Work this out.",
    "A pupil asks you this. Answer clearly.",
];

/// Problem, steps, answer.
fn problem(random: &mut Random) -> (String, Vec<String>, String) {
    let (name, other, city, goods) =
        (random.pick(NAMES), random.pick(NAMES), random.pick(CITIES), random.pick(GOODS));
    let (a, b, c) = (random.between(13, 60), random.between(2, 25), random.between(2, 12));
    match random.below(6) {
        0 => (
            format!(
                "{name} buys {a} boxes of {goods} with {b} in each and gives {c} boxes to {other}. How many {goods} are left?"
            ),
            vec![
                format!("{a} - {c} = {} boxes stay with {name}", a - c),
                format!("{} * {b} = {}", a - c, (a - c) * b),
            ],
            format!("{} {goods} are left.", (a - c) * b),
        ),
        1 => {
            let (speed, hours) = (a + 20, c);
            (
                format!(
                    "A train leaves {city} at {speed} km/h. How far is it after {hours} hours and 30 minutes?"
                ),
                vec![
                    format!("{hours} hours give {speed} * {hours} = {} km", speed * hours),
                    format!("half an hour gives {speed} / 2 = {:.1} km", speed as f64 / 2.0),
                ],
                format!("It is {:.1} km away.", speed as f64 * (hours as f64 + 0.5)),
            )
        }
        2 => {
            let terms: Vec<i64> = (0..5).map(|i| a + b * i).collect();
            let shown: Vec<_> = terms.iter().map(i64::to_string).collect();
            (
                format!("The sequence begins {}. What is its term number {}?", shown.join(", "), c + 6),
                vec![
                    format!("each term is {b} more than the one before"),
                    format!("term n is {a} + {b} * (n - 1), so term {} is {a} + {b} * {}", c + 6, c + 5),
                ],
                format!("It is {}.", a + b * (c + 5)),
            )
        }
        3 => (
            format!("What is the remainder of {a} * {} divided by {}?", b + 13, c + 1),
            vec![
                format!(
                    "{a} leaves {} and {} leaves {} when divided by {}",
                    a % (c + 1),
                    b + 13,
                    (b + 13) % (c + 1),
                    c + 1
                ),
                format!(
                    "{} * {} = {}, of which the remainder is taken once more",
                    a % (c + 1),
                    (b + 13) % (c + 1),
                    (a % (c + 1)) * ((b + 13) % (c + 1))
                ),
            ],
            format!("The remainder is {}.", a * (b + 13) % (c + 1)),
        ),
        4 => {
            let price = 10 * (a + 5);
            (
                format!(
                    "A machine for {goods} costs {price} euros. The price falls by {b} percent and {name} pays 10 euros for delivery. What does {name} pay?"
                ),
                vec![
                    format!("{b} percent of {price} are {:.2}", price as f64 * b as f64 / 100.0),
                    format!(
                        "{price} - {:.2} + 10 = {:.2}",
                        price as f64 * b as f64 / 100.0,
                        price as f64 * (100 - b) as f64 / 100.0 + 10.0
                    ),
                ],
                format!("{name} pays {:.2} euros.", price as f64 * (100 - b) as f64 / 100.0 + 10.0),
            )
        }
        _ => {
            let other = if other == name { "Pepper" } else { other };
            let mut order = vec![name, other, city];
            random.shuffle(&mut order);
            let [first, second, third] = [order[0], order[1], order[2]];
            (
                format!(
                    "Three cats are called {name}, {other} and {city}. {first} is older than {second}, and {third} is younger than {second} by {c} years. If {second} is {a} years old and {first} {b} years older, how old are all three together?"
                ),
                vec![
                    format!("{first} is {a} + {b} = {}", a + b),
                    format!("{third} is {a} - {c} = {}", a - c),
                    format!("{} + {a} + {} = {}", a + b, a - c, 3 * a + b - c),
                ],
                format!("Together they are {} years old.", 3 * a + b - c),
            )
        }
    }
}

pub(super) fn task(random: &mut Random) -> Task {
    let (problem, steps, answer) = problem(random);
    let spoken: Vec<_> = steps.iter().map(|step| format!("- {step}")).collect();
    Task {
        user: format!("{}\n\n{problem}", random.pick(REQUESTS)),
        reasoning: format!("Let me go step by step. {}.", steps.join(". Then ")),
        answer: format!("{}\n\n{answer}", spoken.join("\n")),
        ..Task::default()
    }
}
