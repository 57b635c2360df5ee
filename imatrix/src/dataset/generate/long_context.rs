//! Long notes in which a few facts have to be found again.

use super::words::{CITIES, MONTHS, NAMES, STATEMENTS, SUBJECTS};
use super::{Random, Task};

const QUESTIONS: &[&str] = &[
    "Which code belongs to NOTE? Quote it exactly.",
    "Someone wrote down a code for NOTE. What is it?",
    "Find the code of NOTE in these notes.",
    "After reading everything: what is the code of NOTE?",
];

fn paragraph(random: &mut Random, number: i64) -> String {
    let (subject, name) = (random.pick(SUBJECTS), random.pick(NAMES));
    let first = random.pick(STATEMENTS);
    let second = random.pick(STATEMENTS);
    let (city, month, year) = (random.pick(CITIES), MONTHS[random.below(12)], random.between(1890, 2025));
    match random.below(3) {
        0 => format!(
            "{number}. In {city}, {subject} {first}. {name} noted in {month} {year} that it {second}."
        ),
        1 => format!("{number}. According to {name}, {subject} of {city} {first}; since {year} it {second}."),
        _ => format!(
            "{number}. {month} {year}, {city}: {subject} {first}. A visitor named {name} added that it {second}."
        ),
    }
}

pub(super) fn task(random: &mut Random) -> Task {
    let n_paragraphs = random.between(12, 90);
    let mut notes: Vec<String> = (1..=n_paragraphs).map(|number| paragraph(random, number)).collect();
    let n_codes = random.between(2, 5) as usize;
    let mut subjects: Vec<_> = SUBJECTS.to_vec();
    random.shuffle(&mut subjects);
    let mut codes = Vec::new();
    for subject in &subjects[..n_codes] {
        let code = format!("{}-{:04}", random.pick(&["KX", "TR", "QL", "ZN", "VB"]), random.between(0, 9999));
        let place = random.below(notes.len());
        notes[place].push_str(&format!(" The code of {subject} is {code}."));
        codes.push((*subject, code, place + 1));
    }
    let (subject, code, place) = codes[random.below(codes.len())].clone();
    Task {
        system: String::new(),
        user: format!("{}\n\n{}", notes.join("\n"), random.pick(QUESTIONS).replace("NOTE", subject)),
        reasoning: format!(
            "There are {n_paragraphs} notes and {n_codes} codes in them. The one of {subject} stands in note {place}; \
             the others belong to other places."
        ),
        answer: format!("The code of {subject} is {code} (note {place})."),
        then: None,
    }
}
