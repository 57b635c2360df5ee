//! One question to the chat API: retries with backoff, rate limit, and what each refusal means.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use gguf_tools::progress::Progress;
use rand_core::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use reqwest::Url;
use reqwest::blocking::{Client, Response};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use serde_json::{Value, json};

use super::{CollectError, Settings};
use crate::{http, time};

/// How often and how patiently a question is asked again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Retry {
    /// Attempts in all.
    pub attempts: u32,
    /// Wait after the first failure; it doubles each time. Half of it is random.
    pub first_wait: Duration,
    /// Longest such wait.
    pub longest_wait: Duration,
    /// Longest wait that the API may ask for; it is not tried again if it asks for more.
    pub longest_asked_wait: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 6,
            first_wait: Duration::from_secs(1),
            longest_wait: Duration::from_mins(1),
            longest_asked_wait: Duration::from_mins(10),
        }
    }
}

/// Something worth another attempt.
struct Passing {
    reason: String,
    /// Wait that the API asks for.
    asked: Option<Duration>,
}

enum Failure {
    Passing(Passing),
    Final(CollectError),
}

/// Asks one API with one key.
pub(super) struct Api<'a> {
    settings: &'a Settings,
    client: Client,
    url: Url,
    key: &'a str,
    authorization: HeaderValue,
    last_request: Option<Instant>,
    random: Pcg64,
    progress: &'a dyn Progress,
}

impl<'a> Api<'a> {
    pub(super) fn new(
        settings: &'a Settings,
        key: &'a str,
        progress: &'a dyn Progress,
    ) -> Result<Self, CollectError> {
        let bad = |reason: String| CollectError::BadEndpoint { endpoint: settings.endpoint.clone(), reason };
        let url = Url::parse(&settings.endpoint).map_err(|e| bad(e.to_string()))?;
        let is_safe = url.scheme() == "https" || (url.scheme() == "http" && http::is_loopback(&url));
        if !is_safe {
            return Err(bad("the key would be sent unencrypted; give an https address".to_owned()));
        }
        let mut authorization =
            HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| CollectError::BadKey)?;
        authorization.set_sensitive(true);
        let client = http::client(&url, settings.timeout).map_err(|e| bad(http::with_causes(&e)))?;
        let random = Pcg64::seed_from_u64(RandomState::new().hash_one(std::process::id()));
        Ok(Self { settings, client, url, key, authorization, last_request: None, random, progress })
    }

    /// Asks until there is an answer that `accept` takes, or no hope. `note` hears of every failed attempt.
    pub(super) fn ask<T>(
        &mut self,
        id: &str,
        prompt: &str,
        accept: &dyn Fn(&str) -> Result<T, Unusable>,
        note: &mut dyn FnMut(&str),
    ) -> Result<(String, T), CollectError> {
        let retry = self.settings.retry;
        for attempt in 1.. {
            self.keep_rate()?;
            let failure = match self.attempt(prompt) {
                Ok(text) => match accept(&text) {
                    Ok(answer) => return Ok((text, answer)),
                    Err(Unusable::Passing(reason)) => Passing { reason, asked: None },
                    Err(Unusable::Final(error)) => return Err(error),
                },
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(passing)) => passing,
            };
            let wait = match failure.asked {
                Some(asked) if asked > retry.longest_asked_wait => {
                    return Err(CollectError::AskedToWait { id: id.to_owned(), seconds: asked.as_secs() });
                }
                Some(asked) => asked,
                None => self.backoff(attempt),
            };
            if attempt >= retry.attempts {
                return Err(CollectError::GaveUp {
                    id: id.to_owned(),
                    attempts: attempt,
                    reason: failure.reason,
                });
            }
            note(&format!(
                "case `{id}`: {}; attempt {} of {} in {:.1} s",
                failure.reason,
                attempt + 1,
                retry.attempts,
                wait.as_secs_f64()
            ));
            self.sleep(wait)?;
        }
        unreachable!("attempts are counted up to a bound of 32 bits")
    }

    /// Doubling waits, of which half is random so that clients do not come back together.
    fn backoff(&mut self, attempt: u32) -> Duration {
        let retry = self.settings.retry;
        let factor = 2u32.checked_pow(attempt - 1).unwrap_or(u32::MAX);
        let wait = retry.first_wait.saturating_mul(factor).min(retry.longest_wait);
        let share = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        wait.mul_f64(0.5 + 0.5 * share)
    }

    fn keep_rate(&mut self) -> Result<(), CollectError> {
        if let (Some(last), Some(per_minute)) = (self.last_request, self.settings.per_minute) {
            let interval = Duration::from_mins(1) / per_minute.max(1);
            self.sleep(interval.saturating_sub(last.elapsed()))?;
        }
        self.last_request = Some(Instant::now());
        Ok(())
    }

    fn sleep(&self, time: Duration) -> Result<(), CollectError> {
        const STEP: Duration = Duration::from_millis(50);
        let end = Instant::now() + time;
        loop {
            if self.progress.interrupted() {
                return Err(CollectError::Interrupted);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(STEP));
        }
    }

    /// One request; the text of a successful answer.
    fn attempt(&self, prompt: &str) -> Result<String, Failure> {
        let passing = |reason: String| Failure::Passing(Passing { reason, asked: None });
        let settings = self.settings;
        let request = json!({
            "model": settings.model,
            "messages": [{ "role": "user", "content": prompt }],
            "temperature": 0,
            "max_tokens": settings.max_tokens,
            "logprobs": settings.top_logprobs > 0,
            "top_logprobs": (settings.top_logprobs > 0).then_some(settings.top_logprobs),
            "thinking": { "type": "disabled" },
            "stream": false,
        });
        let sent = self
            .client
            .post(self.url.clone())
            .header(AUTHORIZATION, self.authorization.clone())
            .header(CONTENT_TYPE, "application/json")
            .body(without_nulls(request).to_string())
            .send();
        let response = sent.map_err(|e| passing(self.without_key(&http::with_causes(&e))))?;
        let status = response.status().as_u16();
        let asked = asked_wait(&response);
        let location = response.headers().get("location").and_then(|v| v.to_str().ok()).map(str::to_owned);
        let body = http::body(response).map_err(|e| {
            passing(format!("the answer was cut off ({})", self.without_key(&http::with_causes(&e))))
        });
        if status == 200 {
            return String::from_utf8(body?).map_err(|_| passing("the answer is no text".to_owned()));
        }
        // What a refusal says is a help, not a need: its text may be cut off.
        let message = self.without_key(&error_message(&body.unwrap_or_default()));
        Err(match status {
            429 | 500..=599 => {
                let what = if status == 429 { "too many requests" } else { "the API has a fault" };
                Failure::Passing(Passing { reason: format!("{what} ({status}: {message})"), asked })
            }
            401 | 403 => Failure::Final(CollectError::KeyRefused { status, message }),
            402 => Failure::Final(CollectError::NoBalance { message }),
            300..=399 => Failure::Final(CollectError::Redirected {
                endpoint: settings.endpoint.clone(),
                location: location.unwrap_or_else(|| "an unnamed place".to_owned()),
            }),
            _ => Failure::Final(CollectError::Refused { status, message }),
        })
    }

    /// A text from outside, in which the key does not appear.
    fn without_key(&self, text: &str) -> String {
        text.replace(self.key, "(the key)")
    }
}

/// An answer that came and cannot be used.
pub(super) enum Unusable {
    /// Worth another attempt.
    Passing(String),
    /// Not.
    Final(CollectError),
}

/// `Retry-After`: seconds, or a date.
fn asked_wait(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    let seconds = match text.trim().parse::<u64>() {
        Ok(seconds) => seconds,
        Err(_) => time::from_http_date(text)?.saturating_sub(time::now()),
    };
    Some(Duration::from_secs(seconds))
}

/// What the body of a refusal says: the message of its JSON, else its first line.
fn error_message(body: &[u8]) -> String {
    let said = serde_json::from_slice::<Value>(body).ok();
    let said = said.as_ref().and_then(|v| v.pointer("/error/message")).and_then(Value::as_str);
    let text = String::from_utf8_lossy(body);
    let line = said.unwrap_or_else(|| text.lines().find(|line| !line.trim().is_empty()).unwrap_or("no text"));
    line.trim().chars().take(300).collect()
}

fn without_nulls(mut object: Value) -> Value {
    if let Some(object) = object.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
    object
}
