//! Conversations in the form that the model was trained on.
//!
//! Beginning of sentence, system text, then turns: `<｜User｜>` and text; `<｜Assistant｜>`, then `<think>`, reasoning, `</think>`
//! and the answer, or `</think>` and the answer directly, and the end of sentence. Nothing stands between these parts.
//! Reasoning before the last user turn is left out.

use std::borrow::Cow;

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const THINK: &str = "<think>";
const END_OF_THINKING: &str = "</think>";
/// Between texts that share a turn.
const BREAK: &str = "\n\n";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message<'a> {
    /// Instructions; wherever they stand, they come first.
    System(&'a str),
    /// What the user says.
    User(&'a str),
    /// What the model said.
    Assistant {
        /// What it thought before, if it did.
        reasoning: &'a str,
        /// The answer.
        content: &'a str,
    },
}

/// A part of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChatPart<'a> {
    /// A control token, by its text.
    Control(&'static str),
    /// Text that holds no control tokens, whatever it looks like.
    Text(Cow<'a, str>),
}

/// Renders a conversation.
///
/// `thinking`: whether the model is to think before it answers. `answer_next`: whether its next turn is opened.
/// Between two control tokens stands at most one text.
pub fn render<'a>(messages: &[Message<'a>], thinking: bool, answer_next: bool) -> Vec<ChatPart<'a>> {
    let mut parts = Parts(vec![ChatPart::Control(BOS)]);
    let mut has_system = false;
    for message in messages {
        if let Message::System(text) = *message {
            if has_system {
                parts.text(BREAK);
            }
            has_system |= !text.is_empty();
            parts.text(text);
        }
    }
    let last_user = messages.iter().rposition(|message| matches!(message, Message::User(_)));
    let mut in_user = false;
    for (i, message) in messages.iter().enumerate() {
        match *message {
            Message::System(_) => {}
            Message::User(text) => {
                if in_user {
                    parts.text(BREAK);
                } else {
                    parts.control(USER);
                }
                parts.text(text);
                in_user = true;
            }
            Message::Assistant { reasoning, content } => {
                parts.control(ASSISTANT);
                if thinking && last_user.is_none_or(|last| i > last) {
                    parts.control(THINK);
                    parts.text(reasoning);
                }
                parts.control(END_OF_THINKING);
                parts.text(content);
                parts.control(EOS);
                in_user = false;
            }
        }
    }
    if answer_next {
        parts.control(ASSISTANT);
        parts.control(if thinking { THINK } else { END_OF_THINKING });
    }
    parts.0
}

struct Parts<'a>(Vec<ChatPart<'a>>);

impl<'a> Parts<'a> {
    fn control(&mut self, token: &'static str) {
        self.0.push(ChatPart::Control(token));
    }

    /// Joins the text before, so that it is cut into tokens as a whole.
    fn text(&mut self, text: &'a str) {
        if text.is_empty() {
            return;
        }
        match self.0.last_mut() {
            Some(ChatPart::Text(before)) => before.to_mut().push_str(text),
            _ => self.0.push(ChatPart::Text(Cow::Borrowed(text))),
        }
    }
}

/// The rendered conversation as one text.
pub fn to_text(parts: &[ChatPart<'_>]) -> String {
    let text = |part: &ChatPart<'_>| match part {
        ChatPart::Control(text) => (*text).to_owned(),
        ChatPart::Text(text) => text.clone().into_owned(),
    };
    parts.iter().map(text).collect()
}
