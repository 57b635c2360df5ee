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

/// Reads a size: bytes, or a number with a decimal or binary unit, as `20GB` or `1.5 GiB`.
///
/// # Errors
/// If it is no such size.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 9] = [
        ("KiB", 1024.0),
        ("MiB", 1048576.0),
        ("GiB", 1073741824.0),
        ("TiB", 1099511627776.0),
        ("kB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
        ("B", 1.0),
    ];
    let wrong = || format!("`{text}` is no size; give bytes, or a number with MB, MiB, GB or GiB");
    let trimmed = text.trim();
    let unit = UNITS.iter().find_map(|(name, factor)| Some((trimmed.strip_suffix(name)?, *factor)));
    let (number, factor) = unit.unwrap_or((trimmed, 1.0));
    let value: f64 = number.trim().parse().map_err(|_| wrong())?;
    let n_bytes = value * factor;
    // Above 2^53 a whole number of bytes is not exact, and no disk has so many.
    if (0.0..9e15).contains(&n_bytes) { Ok(n_bytes as u64) } else { Err(wrong()) }
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
        assert_eq!(parse_bytes("20GB"), Ok(20_000_000_000));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(1_610_612_736));
        assert_eq!(parse_bytes("77"), Ok(77));
        assert!(["", "-1", "NaN", "5 apples", "1e30"].iter().all(|text| parse_bytes(text).is_err()));
        assert_eq!(seconds(59.94), "59.9 s");
        assert_eq!(seconds(185.0), "3 min 05 s");
        assert_eq!(seconds(3720.0), "1 h 02 min");
    }
}
