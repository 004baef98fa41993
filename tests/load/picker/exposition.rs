//! OpenMetrics text, read strictly: whatever Prometheus might stumble over is a fault.

use std::collections::{BTreeMap, BTreeSet};

/// A scrape.
pub(super) struct Exposition {
    /// Values by series, as written.
    pub(super) series: BTreeMap<String, f64>,
    kinds: BTreeMap<String, String>,
}

type Labels = Vec<(String, String)>;

impl Exposition {
    pub(super) fn read(text: &str) -> Result<Exposition, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("no end marker")?;
        let mut read = Reader::default();
        for line in body.lines() {
            read.line(line)
                .map_err(|fault| format!("{fault}: {line}"))?;
        }
        read.histograms()?;
        Ok(Exposition {
            series: read.series,
            kinds: read.kinds,
        })
    }

    /// The value of one series; 0 when it is not there.
    pub(super) fn value(&self, series: &str) -> f64 {
        self.series.get(series).copied().unwrap_or_default()
    }

    /// The sum over the series of `name` whose labels `fit`.
    pub(super) fn sum(&self, name: &str, fit: impl Fn(&str) -> bool) -> f64 {
        let labelled = format!("{name}{{");
        let series = self.series.iter();
        series
            .filter(|(key, _)| *key == name || key.starts_with(&labelled))
            .filter(|(key, _)| fit(key))
            .map(|(_, value)| value)
            .sum()
    }

    /// Counters that have fallen since `before`. Those of an engine begin anew when it comes back.
    pub(super) fn fallen(&self, before: &Exposition) -> Vec<String> {
        let counts = |key: &str| {
            let name = key.split('{').next().unwrap_or_default();
            let family = name.strip_suffix("_total").unwrap_or(name);
            self.kinds.get(family).is_some_and(|kind| kind == "counter")
        };
        let both = before.series.iter();
        both.filter(|(key, _)| counts(key) && !key.contains("engine=\""))
            .filter(|(key, value)| self.value(key) < **value)
            .map(|(key, _)| key.clone())
            .collect()
    }
}

#[derive(Default)]
struct Reader {
    family: String,
    kinds: BTreeMap<String, String>,
    described: BTreeSet<String>,
    series: BTreeMap<String, f64>,
    /// `le` and count of each histogram's buckets, by family and the other labels.
    buckets: BTreeMap<(String, Labels), Vec<(f64, f64)>>,
    counts: BTreeMap<(String, Labels), f64>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), &'static str> {
        match line.strip_prefix("# ") {
            Some(meta) => self.meta(meta),
            None => self.sample(line),
        }
    }

    fn meta(&mut self, line: &str) -> Result<(), &'static str> {
        let (what, rest) = line.split_once(' ').ok_or("a bare comment")?;
        let (family, text) = rest.split_once(' ').ok_or("nothing is said")?;
        if self.family != family {
            let new = self.described.insert(family.to_owned());
            new.then_some(()).ok_or("a family in two places")?;
            family.clone_into(&mut self.family);
        }
        match what {
            "HELP" | "UNIT" => Ok(()),
            "TYPE" => {
                let known = ["counter", "gauge", "histogram", "info"].contains(&text);
                let before = self.kinds.insert(family.to_owned(), text.to_owned());
                (known && before.is_none())
                    .then_some(())
                    .ok_or("expected one known type")
            }
            _ => Err("an unknown word after #"),
        }
    }

    fn sample(&mut self, line: &str) -> Result<(), &'static str> {
        let (sample, exemplar) = match line.split_once(" # ") {
            Some((sample, exemplar)) => (sample, Some(exemplar)),
            None => (line, None),
        };
        let (key, value) = sample.rsplit_once(' ').ok_or("no value")?;
        let value: f64 = value.parse().map_err(|_| "a value that is no number")?;
        let (name, labels) = name_and_labels(key)?;
        let suffix = name
            .strip_prefix(&*self.family)
            .ok_or("not of its family")?;
        let kind = self
            .kinds
            .get(&self.family)
            .ok_or("a family without a type")?;
        let may = match kind.as_str() {
            "counter" => ["_total"].contains(&suffix) && 0.0 <= value,
            "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix) && 0.0 <= value,
            "info" => suffix == "_info" && value == 1.0,
            _ => suffix.is_empty() && !value.is_nan(),
        };
        may.then_some(())
            .ok_or("a name or value that its type does not have")?;
        if let Some(exemplar) = exemplar {
            // A value and, perhaps, a time.
            let (labels, numbers) = exemplar.rsplit_once("} ").ok_or("half an exemplar")?;
            let numbers: Vec<_> = numbers.split(' ').map(str::parse::<f64>).collect();
            let short = labels.chars().count() <= 128
                && numbers.len() <= 2
                && numbers.iter().all(Result::is_ok);
            (["_total", "_bucket"].contains(&suffix) && short)
                .then_some(())
                .ok_or("an exemplar where none may be")?;
            name_and_labels(&format!("x{labels}}}"))?;
        }
        if kind == "histogram" {
            let (le, others): (Labels, Labels) =
                labels.into_iter().partition(|(name, _)| name == "le");
            let whose = (self.family.clone(), others);
            match suffix {
                "_bucket" => {
                    let le = le.first().and_then(|(_, le)| le.parse().ok());
                    let le = le.ok_or("a bucket without le")?;
                    self.buckets.entry(whose).or_default().push((le, value));
                }
                "_count" => drop(self.counts.insert(whose, value)),
                _ => {}
            }
        }
        let twice = self.series.insert(key.to_owned(), value).is_some();
        (!twice).then_some(()).ok_or("a series twice")
    }

    fn histograms(&self) -> Result<(), String> {
        for (whose, buckets) in &self.buckets {
            let ascend = buckets.windows(2).all(|pair| pair[0].0 < pair[1].0);
            let grow = buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1);
            let last = buckets.last().copied();
            let whole = self.counts.get(whose).map(|count| (f64::INFINITY, *count));
            if !ascend || !grow || last != whole {
                return Err(format!("no histogram: {whose:?} {buckets:?}"));
            }
        }
        Ok(())
    }
}

fn name_and_labels(key: &str) -> Result<(&str, Labels), &'static str> {
    let Some((name, rest)) = key.split_once('{') else {
        return named(key).then_some((key, Vec::new())).ok_or("a bad name");
    };
    let mut rest = rest.strip_suffix('}').ok_or("an open brace")?;
    let mut labels = Labels::new();
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"").ok_or("a label without a value")?;
        let mut value = String::new();
        let mut characters = after.chars();
        loop {
            match characters.next().ok_or("an open quote")? {
                '"' => break,
                '\\' => match characters.next() {
                    Some('n') => value.push('\n'),
                    Some(c @ ('\\' | '"')) => value.push(c),
                    _ => return Err("an unknown escape"),
                },
                c => value.push(c),
            }
        }
        let new = labels.iter().all(|(before, _)| before != label);
        (named(label) && new).then_some(()).ok_or("a bad label")?;
        labels.push((label.to_owned(), value));
        rest = characters.as_str();
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    named(name).then_some((name, labels)).ok_or("a bad name")
}

fn named(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[test]
fn what_prometheus_would_refuse_is_refused() {
    let good =
        "# HELP a Text.\n# TYPE a counter\na_total{b=\"c\\\"\"} 1 # {t=\"0\"} 1.0 17.5\n# EOF\n";
    assert_eq!(
        Exposition::read(good).unwrap().sum("a_total", |_| true),
        1.0
    );
    for bad in [
        "# TYPE a counter\na_total 1\n",
        "# TYPE a counter\na_total 1\na_total 1\n# EOF\n",
        "# TYPE a counter\na 1\n# EOF\n",
        "# TYPE a counter\nb_total 1\n# EOF\n",
        "# TYPE a gauge\na{b=\"c} 1\n# EOF\n",
        "# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\n# TYPE a gauge\n# EOF\n",
        "# TYPE a histogram\na_bucket{le=\"1.0\"} 2\na_bucket{le=\"+Inf\"} 1\na_count 1\n# EOF\n",
        "# TYPE a histogram\na_bucket{le=\"+Inf\"} 1\na_count 2\n# EOF\n",
    ] {
        assert!(Exposition::read(bad).is_err(), "{bad}");
    }
}
