//! Short texts in five languages, put together from aligned parts, so that every translation is known.

use super::{Random, Task};

const LANGUAGES: [&str; 5] = ["English", "German", "French", "Spanish", "Italian"];
/// A part in each of [`LANGUAGES`].
type Part = [&'static str; 5];

const SUBJECTS: &[Part] = &[
    ["The engineer", "Der Ingenieur", "L'ingénieur", "El ingeniero", "L'ingegnere"],
    ["The doctor", "Der Arzt", "Le médecin", "El médico", "Il medico"],
    ["My neighbour", "Mein Nachbar", "Mon voisin", "Mi vecino", "Il mio vicino"],
    ["The baker", "Der Bäcker", "Le boulanger", "El panadero", "Il fornaio"],
    ["Her brother", "Ihr Bruder", "Son frère", "Su hermano", "Suo fratello"],
    [
        "The new colleague",
        "Der neue Kollege",
        "Le nouveau collègue",
        "El nuevo compañero",
        "Il nuovo collega",
    ],
    ["The teacher", "Der Lehrer", "Le professeur", "El profesor", "L'insegnante"],
    ["The gardener", "Der Gärtner", "Le jardinier", "El jardinero", "Il giardiniere"],
];
const VERBS: &[Part] = &[
    ["checks", "prüft", "vérifie", "revisa", "controlla"],
    ["sells", "verkauft", "vend", "vende", "vende"],
    ["repairs", "repariert", "répare", "repara", "ripara"],
    ["describes", "beschreibt", "décrit", "describe", "descrive"],
    ["needs", "braucht", "a besoin d'obtenir", "necesita", "ha bisogno di avere"],
    ["photographs", "fotografiert", "photographie", "fotografía", "fotografa"],
    ["is looking for", "sucht", "cherche", "busca", "cerca"],
    ["cleans", "reinigt", "nettoie", "limpia", "pulisce"],
];
const OBJECTS: &[Part] = &[
    ["the old machine", "die alte Maschine", "la vieille machine", "la máquina vieja", "la vecchia macchina"],
    ["the red car", "das rote Auto", "la voiture rouge", "el coche rojo", "l'auto rossa"],
    ["the small house", "das kleine Haus", "la petite maison", "la casa pequeña", "la piccola casa"],
    ["the wooden table", "den Holztisch", "la table en bois", "la mesa de madera", "il tavolo di legno"],
    ["the blue bicycle", "das blaue Fahrrad", "le vélo bleu", "la bicicleta azul", "la bicicletta blu"],
    [
        "the kitchen window",
        "das Küchenfenster",
        "la fenêtre de la cuisine",
        "la ventana de la cocina",
        "la finestra della cucina",
    ],
    ["the broken clock", "die kaputte Uhr", "l'horloge cassée", "el reloj roto", "l'orologio rotto"],
    ["the large boat", "das große Boot", "le grand bateau", "el barco grande", "la grande barca"],
];
const TIMES: &[Part] = &[
    ["every morning", "jeden Morgen", "chaque matin", "cada mañana", "ogni mattina"],
    ["on Fridays", "freitags", "le vendredi", "los viernes", "il venerdì"],
    [
        "before breakfast",
        "vor dem Frühstück",
        "avant le petit déjeuner",
        "antes del desayuno",
        "prima di colazione",
    ],
    ["with great care", "mit großer Sorgfalt", "avec grand soin", "con mucho cuidado", "con grande cura"],
    ["in the rain", "im Regen", "sous la pluie", "bajo la lluvia", "sotto la pioggia"],
    ["without a word", "ohne ein Wort", "sans un mot", "sin decir nada", "senza una parola"],
];
const REQUESTS: &[&str] = &[
    "Translate from FROM to TO:",
    "How do you say this in TO? The text is FROM.",
    "FROM text follows. Give the TO version, nothing else.",
    "Please put these FROM sentences into natural TO.",
    "I am writing to a customer who reads only TO. Translate my FROM note.",
];

pub(super) fn task(random: &mut Random) -> Task {
    let from = random.below(LANGUAGES.len());
    let to = (from + 1 + random.below(LANGUAGES.len() - 1)) % LANGUAGES.len();
    let n_sentences = random.between(1, 5);
    let parts: Vec<[Part; 4]> = (0..n_sentences)
        .map(|_| [SUBJECTS, VERBS, OBJECTS, TIMES].map(|list| list[random.below(list.len())]))
        .collect();
    let write = |language: usize| {
        let sentences = parts.iter().map(|parts| parts.map(|part| part[language]).join(" ") + ".");
        sentences.collect::<Vec<_>>().join(" ")
    };
    let request = random.pick(REQUESTS).replace("FROM", LANGUAGES[from]).replace("TO", LANGUAGES[to]);
    let glossary = parts.iter().map(|parts| format!("`{}` is `{}`", parts[2][from], parts[2][to]));
    Task {
        user: format!("{request}\n\n{}", write(from)),
        reasoning: format!(
            "The text is {} and has {n_sentences} sentences in the present tense. {}. I keep the order of the sentences.",
            LANGUAGES[from],
            glossary.collect::<Vec<_>>().join("; ")
        ),
        answer: write(to),
        ..Task::default()
    }
}
