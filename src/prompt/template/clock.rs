//! Dates as Python's `datetime.strftime` prints them, in UTC and in English.
//!
//! Lives here: the calendar and the directives that chat templates use.
//! Never here: time zones, locales.
//! Invariant: an unknown directive is kept as it is written, as glibc does.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// A moment, taken apart.
struct Civil {
    year: u64,
    /// 0 to 11.
    month: usize,
    /// 1 to 31.
    day: u64,
    /// 0 is Sunday.
    weekday: usize,
    /// 1 to 366.
    year_day: u64,
    hour: u64,
    minute: u64,
    second: u64,
    micros: u32,
}

impl Civil {
    fn of(time: SystemTime) -> Civil {
        let since = (time.duration_since(SystemTime::UNIX_EPOCH)).unwrap_or(Duration::ZERO);
        let (mut days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
        // 1970-01-01 was a Thursday.
        let weekday = ((days + 4) % 7) as usize;
        let mut year = 1970;
        while year_days(year) <= days {
            days -= year_days(year);
            year += 1;
        }
        let year_day = days + 1;
        let mut month = 0;
        while month_days(year, month) <= days {
            days -= month_days(year, month);
            month += 1;
        }
        Civil {
            year,
            month,
            day: days + 1,
            weekday,
            year_day,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
            micros: since.subsec_micros(),
        }
    }
}

fn leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn year_days(year: u64) -> u64 {
    if leap(year) { 366 } else { 365 }
}

fn month_days(year: u64, month: usize) -> u64 {
    match month {
        1 if leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// `time` in UTC, formatted.
pub(super) fn strftime(time: SystemTime, format: &str) -> String {
    let civil = Civil::of(time);
    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let Some(mut directive) = chars.next() else {
            out.push('%');
            break;
        };
        // glibc's flag for "no padding".
        let padded = directive != '-';
        if !padded {
            let Some(next) = chars.next() else {
                out.push_str("%-");
                break;
            };
            directive = next;
        }
        if write_directive(&mut out, &civil, directive, padded).is_err() {
            break;
        }
    }
    out
}

fn write_directive(
    out: &mut String,
    civil: &Civil,
    directive: char,
    padded: bool,
) -> std::fmt::Result {
    let (month, day) = (MONTHS[civil.month % 12], DAYS[civil.weekday % 7]);
    let hour12 = match civil.hour % 12 {
        0 => 12,
        hour => hour,
    };
    let two = if padded { 2 } else { 1 };
    match directive {
        'Y' => write!(out, "{}", civil.year),
        'y' => write!(out, "{:0two$}", civil.year % 100),
        'm' => write!(out, "{:0two$}", civil.month + 1),
        'B' => write!(out, "{month}"),
        'b' | 'h' => write!(out, "{}", &month[..3]),
        'd' => write!(out, "{:0two$}", civil.day),
        'e' if padded => write!(out, "{:2}", civil.day),
        'e' => write!(out, "{}", civil.day),
        'A' => write!(out, "{day}"),
        'a' => write!(out, "{}", &day[..3]),
        'w' => write!(out, "{}", civil.weekday),
        'u' => write!(out, "{}", (civil.weekday + 6) % 7 + 1),
        'j' if padded => write!(out, "{:03}", civil.year_day),
        'j' => write!(out, "{}", civil.year_day),
        'H' => write!(out, "{:0two$}", civil.hour),
        'I' => write!(out, "{hour12:0two$}"),
        'M' => write!(out, "{:0two$}", civil.minute),
        'S' => write!(out, "{:0two$}", civil.second),
        'f' => write!(out, "{:06}", civil.micros),
        'p' => write!(out, "{}", if civil.hour < 12 { "AM" } else { "PM" }),
        'F' => write_all(out, civil, "Y-m-d"),
        'T' => write_all(out, civil, "H:M:S"),
        'R' => write_all(out, civil, "H:M"),
        'D' | 'x' => write_all(out, civil, "m/d/y"),
        'X' => write_all(out, civil, "H:M:S"),
        'c' => write_all(out, civil, "a b e H:M:S Y"),
        // Empty for a time without a zone, which is what Python's `datetime.now()` returns.
        'Z' | 'z' => Ok(()),
        'n' => writeln!(out),
        't' => write!(out, "\t"),
        '%' => write!(out, "%"),
        other if padded => write!(out, "%{other}"),
        other => write!(out, "%-{other}"),
    }
}

/// A composed directive: letters are directives, the rest is itself.
fn write_all(out: &mut String, civil: &Civil, pattern: &str) -> std::fmt::Result {
    for c in pattern.chars() {
        if c.is_ascii_alphabetic() {
            write_directive(out, civil, c, true)?;
        } else {
            out.push(c);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn dates_print_as_python_prints_them() {
        // Worked out with Python: datetime.fromtimestamp(1709251199, timezone.utc).
        let leap_day = at(1_709_251_199);
        for (format, expected) in [
            ("%Y-%m-%d %H:%M:%S", "2024-02-29 23:59:59"),
            ("%d %B %Y", "29 February 2024"),
            ("%A, %b %-d, %y (%j)", "Thursday, Feb 29, 24 (060)"),
            ("%I:%M %p%Z", "11:59 PM"),
            ("%F %T %%", "2024-02-29 23:59:59 %"),
            ("%q %", "%q %"),
        ] {
            assert_eq!(strftime(leap_day, format), expected, "{format}");
        }
        assert_eq!(strftime(at(0), "%a %-m/%-d %-H %-I"), "Thu 1/1 0 12");
        assert_eq!(strftime(at(4_102_444_799), "%F"), "2099-12-31");
    }
}
