//! How long to wait before the next attempt.

use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};

use crate::settings::Retry;

/// The wait that an answer asks for: `Retry-After` in seconds or as a date, or the reset of `RateLimit`.
pub(super) fn asked_for(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    if let Some(value) = text(RETRY_AFTER.as_str()) {
        if let Ok(seconds) = value.parse() {
            return Some(Duration::from_secs(seconds));
        }
        let now = text(DATE.as_str()).and_then(http_date).unwrap_or_else(unix_now);
        return http_date(value).map(|then| Duration::from_secs(then.saturating_sub(now)));
    }
    // draft-ietf-httpapi-ratelimit-headers: `"name";r=REMAINING;t=SECONDS`
    let limit = text("ratelimit")?;
    let field =
        |name: &str| limit.split(';').find_map(|part| part.trim().strip_prefix(name)?.parse::<u64>().ok());
    (field("r=") == Some(0)).then(|| field("t=")).flatten().map(Duration::from_secs)
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Seconds since 1970 of a date as HTTP has them: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let mut words = text.split_once(", ")?.1.split_whitespace();
    let day: u64 = words.next()?.parse().ok()?;
    let month = words.next()?;
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    let year: u64 = words.next()?.parse().ok()?;
    let mut clock = words.next()?.split(':').map(|part| part.parse::<u64>().ok());
    let (hours, minutes, seconds) = (clock.next()??, clock.next()??, clock.next()??);
    if !(1970..10_000).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    // Years that begin in March put the leap day last.
    let (shifted_year, shifted_month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = shifted_year / 4 - shifted_year / 100 + shifted_year / 400;
    let days = 365 * shifted_year + leap_days + (153 * shifted_month + 2) / 5 + day - 1;
    /// Days from the first of March of the year 0 to the first of January 1970.
    const EPOCH: u64 = 719_468;
    Some((days - EPOCH) * 86_400 + hours * 3600 + minutes * 60 + seconds)
}

/// Waits of one connection, doubled after each failure and spread at random so that connections do not ask in step.
#[derive(Debug)]
pub(crate) struct Backoff {
    retry: Retry,
    failures: u32,
    random: RandomState,
}

impl Backoff {
    pub(crate) fn new(retry: Retry) -> Self {
        Self { retry, failures: 0, random: RandomState::new() }
    }

    /// Something came: the next failure is the first again.
    pub(crate) fn progress(&mut self) {
        self.failures = 0;
    }

    /// Counts a failure. The wait before the next attempt, or `None` if there were enough.
    pub(crate) fn failure(&mut self, asked_for: Option<Duration>) -> Option<Duration> {
        self.failures += 1;
        if self.failures >= self.retry.attempts {
            return None;
        }
        let doubled = self.retry.first_wait.saturating_mul(1 << (self.failures - 1).min(16));
        // Half to all of it.
        let share = 0.5 + 0.5 * (self.random.hash_one(self.failures) as f64 / u64::MAX as f64);
        let own = doubled.min(self.retry.longest_wait).mul_f64(share);
        Some(asked_for.map_or(own, |asked| asked.max(own)).min(self.retry.longest_wait))
    }

    pub(crate) fn attempts(&self) -> u32 {
        self.failures
    }
}

/// Holds back all connections when a server asks one of them to wait.
#[derive(Debug, Default)]
pub(crate) struct Gate(Mutex<Option<Instant>>);

impl Gate {
    pub(crate) fn close_for(&self, wait: Duration) {
        let until = Instant::now() + wait;
        let mut gate = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *gate = Some(gate.map_or(until, |earlier| earlier.max(until)));
    }

    pub(crate) fn closed_for(&self) -> Duration {
        let gate = *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        gate.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use reqwest::header::{HeaderName, HeaderValue};

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn servers_may_ask_in_seconds_by_date_or_by_rate_limit() {
        let seconds =
            |pairs: &[(&'static str, &'static str)]| asked_for(&headers(pairs)).map(|d| d.as_secs());
        assert_eq!(seconds(&[("retry-after", "7")]), Some(7));
        let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(seconds(&[date, ("retry-after", "Sun, 06 Nov 1994 08:50:00 GMT")]), Some(23));
        assert_eq!(seconds(&[("ratelimit", "\"api\";r=0;t=55")]), Some(55));
        assert_eq!(seconds(&[("ratelimit", "\"api\";r=3;t=55")]), None);
        assert_eq!(seconds(&[("retry-after", "soon")]), None);
        assert_eq!(seconds(&[]), None);
    }

    #[test]
    fn dates_are_seconds_since_1970() {
        assert_eq!(http_date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(http_date("Thu, 29 Feb 2024 23:59:59 GMT"), Some(1_709_251_199));
        assert_eq!(http_date("06 Nov 1994"), None);
        assert_eq!(http_date("Sun, 06 Nov 1994 08 GMT"), None);
    }

    #[test]
    fn waits_double_stay_within_bounds_and_end() {
        let retry = Retry {
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_millis(350),
            attempts: 5,
        };
        let mut backoff = Backoff::new(retry);
        let waits: Vec<_> = std::iter::from_fn(|| backoff.failure(None)).map(|w| w.as_millis()).collect();
        assert_eq!(waits.len(), 4);
        for (wait, full) in waits.iter().zip([100, 200, 350, 350]) {
            assert!((full / 2..=full).contains(wait), "{waits:?}");
        }
        backoff.progress();
        assert_eq!(backoff.failure(Some(Duration::from_millis(300))), Some(Duration::from_millis(300)));
        assert_eq!(backoff.failure(Some(Duration::from_hours(1))), Some(retry.longest_wait));
    }
}
