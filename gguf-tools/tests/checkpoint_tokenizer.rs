//! Tokenizer metadata against llama.cpp's converter, and the chat template that comes with this program.

use std::fs;
use std::path::Path;

use gguf_tools::checkpoint::tokenizer::{self, ChatTemplate, Tokenizer};
use gguf_tools::checkpoint::{Checkpoint, CheckpointError};
use gguf_tools::gguf::Value;
use gguf_tools::progress::Silent;
use gguf_tools::synth::{Shape, SynthOptions, write_checkpoint};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use test_vectors::{fixtures, hex};

fn sha256(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// A list of texts as Python prints it.
fn python_list(texts: &[String]) -> String {
    let quoted = texts.iter().map(|text| {
        let escaped = text.replace('\\', "\\\\");
        if text.contains('\'') && !text.contains('"') {
            format!("\"{escaped}\"")
        } else {
            format!("'{}'", escaped.replace('\'', "\\'"))
        }
    });
    format!("[{}]", quoted.collect::<Vec<_>>().join(", "))
}

fn as_text(value: &Value) -> String {
    match value {
        Value::String(text) => format!("STRING = '{text}'"),
        Value::U32(number) => format!("UINT32 = {number}"),
        Value::Bool(truth) => format!("BOOL = {}", if *truth { "True" } else { "False" }),
        _ => String::new(),
    }
}

#[test]
fn the_vocabulary_of_the_tiny_checkpoint_is_what_llama_cpp_writes() {
    let Some(folder) = fixtures("golden tokenizer") else { return };
    let checkpoint = Checkpoint::open(folder.join("tiny-native")).unwrap();
    let header = fs::read_to_string(folder.join("golden/llamacpp_header.txt")).unwrap();
    let mut ours = tokenizer::metadata(&checkpoint).unwrap();
    for (key, golden) in
        header.lines().filter_map(|line| line.strip_prefix("KV tokenizer.ggml.")?.split_once(" : "))
    {
        let value =
            ours.remove(&format!("tokenizer.ggml.{key}")).unwrap_or_else(|| panic!("{key} is missing"));
        let Some(array) = value.as_array() else {
            assert_eq!(as_text(&value), golden, "{key}");
            continue;
        };
        assert!(golden.contains(&format!("[len {}]", array.len())), "{key}: {}", array.len());
        let printed = match (array.as_strs(), array.as_i64s()) {
            (Some(texts), _) => python_list(texts),
            (_, Some(numbers)) => format!("{numbers:?}"),
            _ => panic!("{key} is neither text nor numbers"),
        };
        assert!(golden.contains(&format!("sha256(repr)={}", sha256(&printed))), "{key}");
    }
    assert_eq!(
        ours.iter().map(|(key, _)| key).collect::<Vec<_>>(),
        ["tokenizer.chat_template", "ggsmith.chat_template_source"]
    );
}

/// A tiny checkpoint whose `tokenizer.json` was changed.
fn with_tokenizer(place: &Path, change: impl FnOnce(&mut Json)) -> Result<Tokenizer, CheckpointError> {
    let folder = place.join("tiny");
    if !folder.exists() {
        let options = SynthOptions { experts: Some(2), layers: Some(1), ..SynthOptions::new(Shape::Tiny) };
        write_checkpoint(&folder, &options, &Silent).unwrap();
        fs::copy(folder.join("tokenizer.json"), place.join("sound.json")).unwrap();
    }
    let mut json: Json = serde_json::from_slice(&fs::read(place.join("sound.json")).unwrap()).unwrap();
    change(&mut json);
    fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::of(&Checkpoint::open(&folder).unwrap())
}

#[test]
fn both_forms_of_merges_read_alike() {
    let place = tempfile::tempdir().unwrap();
    let text = with_tokenizer(place.path(), |_| ()).unwrap();
    let pairs = with_tokenizer(place.path(), |json| {
        for merge in json["model"]["merges"].as_array_mut().unwrap() {
            let (left, right) = merge.as_str().unwrap().split_once(' ').unwrap();
            *merge = json!([left, right]);
        }
    });
    assert_eq!(pairs.unwrap(), text);
}

#[test]
fn a_tokenizer_that_is_not_the_release_s_is_refused_with_what_differs() {
    let place = tempfile::tempdir().unwrap();
    let refusal = |change: fn(&mut Json)| with_tokenizer(place.path(), change).unwrap_err().to_string();
    let other =
        refusal(|json| json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("\\p{N}"));
    assert!(other.contains("tokenizer.json") && other.contains("step 0"), "{other}");
    assert!(
        refusal(|json| json["pre_tokenizer"] = json!({ "type": "ByteLevel" }))
            .contains("0 pre-tokenizer steps")
    );
    assert!(
        refusal(|json| json["model"]["type"] = json!("Unigram")).contains("\"Unigram\", expected \"BPE\"")
    );
    assert!(refusal(|json| json["model"]["vocab"]["xyz"] = json!(4000)).contains("id 4000"));
    assert!(refusal(|json| json["model"]["vocab"]["xyz"] = json!(5)).contains("both have id 5"));
    assert!(refusal(|json| json["model"]["merges"][3] = json!("abc")).contains("merge 3"));
    let harmless = |json: &mut Json| json["pre_tokenizer"]["pretokenizers"][3]["trim_offsets"] = json!(false);
    assert!(with_tokenizer(place.path(), harmless).is_ok());
}

/// The template that comes with this program, rendered.
fn render(context: Json) -> Result<String, minijinja::Error> {
    let mut environment = minijinja::Environment::new();
    environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
    });
    let template = include_str!("../src/checkpoint/chat_template.jinja");
    environment.add_template("chat", template)?;
    environment.get_template("chat")?.render(minijinja::value::Serde(context))
}

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";

#[test]
fn a_conversation_renders_without_anything_between_its_parts_and_drops_old_reasoning() {
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "content": "Hello", "reasoning_content": "greet" },
        { "role": "user", "content": "Bye" },
    ]);
    let text = |more: Json| {
        let mut context = json!({ "messages": messages, "add_generation_prompt": true });
        context.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        render(context).unwrap()
    };
    let turns =
        format!("{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello{EOS}<｜User｜>Bye<｜Assistant｜>");
    assert_eq!(text(json!({ "thinking": true })), format!("{turns}<think>"));
    assert_eq!(text(json!({ "enable_thinking": false })), format!("{turns}</think>"));
    assert_eq!(text(json!({})), format!("{turns}</think>"));
}

#[test]
fn the_last_answer_keeps_its_reasoning() {
    let messages = json!([
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "content": "Hello", "reasoning_content": "greet" },
    ]);
    let text = render(json!({ "messages": messages, "thinking": true })).unwrap();
    assert_eq!(text, format!("{BOS}<｜User｜>Hi<｜Assistant｜><think>greet</think>Hello{EOS}"));
}

#[test]
fn tools_calls_and_results_render_in_dsml_and_keep_all_reasoning() {
    let call = |name: &str, arguments: Json| json!({ "type": "function", "function": { "name": name, "arguments": arguments } });
    let text = render(json!({
        "messages": [
            { "role": "user", "content": "Weather?" },
            {
                "role": "assistant",
                "reasoning_content": "look",
                "tool_calls": [call("weather", json!({ "city": "Oslo", "days": 2 }))],
            },
            { "role": "tool", "content": "rain" },
            { "role": "tool", "content": "snow" },
        ],
        "tools": [{ "type": "function", "function": { "name": "weather" } }],
        "thinking": true,
        "add_generation_prompt": true,
    }))
    .unwrap();
    let called = "<｜User｜>Weather?<｜Assistant｜><think>look</think>\n\n<｜DSML｜tool_calls>\n\
        <｜DSML｜invoke name=\"weather\">\n\
        <｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n\
        <｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n\
        </｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let results =
        "<｜User｜><tool_result>rain</tool_result>\n\n<tool_result>snow</tool_result><｜Assistant｜><think>";
    assert!(text.ends_with(&format!("{called}{EOS}{results}")), "{text}");
    assert!(
        text.starts_with(&format!("{BOS}## Tools")) && text.contains("{\"name\": \"weather\"}"),
        "{text}"
    );
}

#[test]
fn effort_that_needs_the_release_s_own_words_is_refused_not_ignored() {
    let refused = render(json!({ "messages": [], "reasoning_effort": "max" })).unwrap_err();
    assert!(refused.to_string().contains("maximum effort"), "{refused}");
}

#[test]
fn a_checkpoint_s_own_template_is_preferred() {
    let place = tempfile::tempdir().unwrap();
    with_tokenizer(place.path(), |_| ()).unwrap();
    let folder = place.path().join("tiny");
    let template = || ChatTemplate::of(&Checkpoint::open(&folder).unwrap()).unwrap();
    assert_eq!(template().source, "ggsmith");
    let settings = json!({ "chat_template": [{ "name": "rag", "template": "A" }, { "name": "default", "template": "B" }] });
    fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
    assert_eq!((template().source, template().text.as_str()), ("tokenizer_config.json", "B"));
    fs::write(folder.join("chat_template.jinja"), "C").unwrap();
    assert_eq!((template().source, template().text.as_str()), ("chat_template.jinja", "C"));
}
