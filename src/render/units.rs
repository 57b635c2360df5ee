//! The one home of units: sizes, rates, times.

/// Bytes with the exact number and a readable one: `86714775900 bytes (80.76 GiB)`.
pub(crate) fn exact_bytes(n_bytes: u64) -> String {
    format!("{n_bytes} bytes ({})", bytes(n_bytes))
}

/// Bytes in binary units, two decimals: `80.76 GiB`.
pub(crate) fn bytes(n_bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n_bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n_bytes} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// Reads a size: a number with K, M, G or T (powers of 1000, as disks and llama.cpp count), KiB to TiB (powers of
/// 1024), or bytes.
///
/// # Errors
/// What is expected, if the text is no size.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is no size; expected a number with a unit, as 48GB, 500M or 4GiB");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit = text[digits..].trim().to_ascii_uppercase();
    let power = |letter: &str| ["K", "M", "G", "T"].iter().position(|l| *l == letter).map(|i| i as i32 + 1);
    let factor = match unit.as_str() {
        "" | "B" => Some(1.0),
        unit => match unit.strip_suffix("IB") {
            Some(letter) => power(letter).map(|n| 1024_f64.powi(n)),
            None => power(unit.strip_suffix('B').unwrap_or(unit)).map(|n| 1000_f64.powi(n)),
        },
    };
    let bytes = number * factor.ok_or_else(wrong)?;
    if bytes >= 1.0 && bytes < 2_f64.powi(63) { Ok(bytes as u64) } else { Err(wrong()) }
}

/// Seconds as `1 h 02 min`, `3 min 05 s` or `12.3 s`.
pub(crate) fn seconds(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    if seconds < 60.0 {
        format!("{seconds:.1} s")
    } else if whole < 3600 {
        format!("{} min {:02} s", whole / 60, whole % 60)
    } else {
        format!("{} h {:02} min", whole / 3600, whole % 3600 / 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_well_at_the_edges() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.00 KiB");
        assert_eq!(exact_bytes(86_714_775_900), "86714775900 bytes (80.76 GiB)");
        assert_eq!(parse_bytes("48GB"), Ok(48_000_000_000));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!([parse_bytes("500M"), parse_bytes("77")], [Ok(500_000_000), Ok(77)]);
        for wrong in ["", "GB", "0", "-1G", "1X", "99999999T"] {
            assert!(parse_bytes(wrong).unwrap_err().contains("48GB"), "{wrong}");
        }
        assert_eq!(seconds(59.94), "59.9 s");
        assert_eq!(seconds(185.0), "3 min 05 s");
        assert_eq!(seconds(3720.0), "1 h 02 min");
    }
}
