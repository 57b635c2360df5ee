//! Dates as APIs write them.

use std::time::{SystemTime, UNIX_EPOCH};

/// Days from 1970-01-01 to a day of the Gregorian calendar; months and days count from 1.
/// The year is taken to begin in March, so that the leap day comes last.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

/// `2026-05-06T22:09:33Z` of seconds since 1970.
pub fn utc_text(unix_seconds: u64) -> String {
    let days = (unix_seconds / 86_400) as i64;
    let of_day = unix_seconds % 86_400;
    // A year has at least 365 days, so the first guess is never too early by more than the leap days passed.
    let mut year = 1970 + days / 365;
    while days_from_civil(year, 1, 1) > days {
        year -= 1;
    }
    let month = (1..=12).rev().find(|&month| days_from_civil(year, month, 1) <= days).unwrap_or(1);
    let day = days - days_from_civil(year, month, 1) + 1;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

/// Seconds since 1970, now.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Seconds since 1970 of a date as HTTP headers write it: `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110, 5.6.7).
pub fn from_http_date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let words: Vec<&str> = text.split_whitespace().collect();
    let [_, day, month, year, clock, "GMT"] = words.as_slice() else { return None };
    let month = MONTHS.iter().position(|name| name == month)? as i64 + 1;
    let (day, year): (i64, i64) = (day.parse().ok()?, year.parse().ok()?);
    if !(1..=31).contains(&day) || !(1970..=9999).contains(&year) {
        return None;
    }
    let mut parts = clock.split(':').map(|part| part.parse::<u64>().ok());
    let (hours, minutes, seconds) = (parts.next()??, parts.next()??, parts.next()??);
    if hours > 23 || minutes > 59 || seconds > 60 {
        return None;
    }
    let days = u64::try_from(days_from_civil(year, month, day)).ok()?;
    Some(days * 86_400 + hours * 3600 + minutes * 60 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates_come_out_right() {
        assert_eq!(utc_text(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc_text(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc_text(1_778_105_373), "2026-05-06T22:09:33Z");
        assert_eq!(utc_text(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(from_http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(from_http_date("soon"), None);
        assert_eq!(from_http_date("Sun, 99 Nov 1994 08:49:37 GMT"), None);
    }
}
