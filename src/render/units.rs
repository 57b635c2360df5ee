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
        assert_eq!(seconds(59.94), "59.9 s");
        assert_eq!(seconds(185.0), "3 min 05 s");
        assert_eq!(seconds(3720.0), "1 h 02 min");
    }
}
