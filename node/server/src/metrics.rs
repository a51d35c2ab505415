//! Metrics as text for Prometheus, in the format of `OpenMetrics` 1.0.

/// Labels with their values.
pub type Labels = Vec<(&'static str, String)>;

/// One value with its labels.
pub type Sample = (Labels, f64);

/// A metric with all its samples.
#[derive(Debug)]
pub struct Family {
    name: &'static str,
    help: &'static str,
    kind: &'static str,
    /// Each with what its name ends with.
    samples: Vec<(&'static str, Sample)>,
}

/// How often a value was at most a bound, and no smaller one; and the sum of the values.
#[derive(Debug)]
pub struct Histogram {
    pub labels: Labels,
    /// The last bound is infinity.
    pub buckets: Vec<(f64, u64)>,
    pub sum: f64,
}

#[must_use]
pub fn gauge(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    let samples = samples.into_iter().map(|sample| ("", sample));
    Family {
        name,
        help,
        kind: "gauge",
        samples: samples.collect(),
    }
}

#[must_use]
pub fn counter(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    let samples = samples.into_iter().map(|sample| ("_total", sample));
    Family {
        name,
        help,
        kind: "counter",
        samples: samples.collect(),
    }
}

#[must_use]
pub fn histogram(name: &'static str, help: &'static str, all: Vec<Histogram>) -> Family {
    let mut samples = Vec::new();
    for one in all {
        let mut count = 0;
        for (bound, more) in one.buckets {
            count += more;
            let bound = match bound.is_finite() {
                true => format!("{bound:?}"),
                false => "+Inf".to_owned(),
            };
            let mut labels = one.labels.clone();
            labels.push(("le", bound));
            samples.push(("_bucket", (labels, number(count))));
        }
        samples.push(("_count", (one.labels.clone(), number(count))));
        samples.push(("_sum", (one.labels, one.sum)));
    }
    Family {
        name,
        help,
        kind: "histogram",
        samples,
    }
}

/// The text of metrics whose names begin with `prefix`; those without a sample are left out.
#[must_use]
pub fn text(prefix: &str, families: &[Family]) -> String {
    let mut text = String::new();
    for family in families.iter().filter(|one| !one.samples.is_empty()) {
        let (name, help, kind) = (family.name, family.help, family.kind);
        text += &format!("# HELP {prefix}_{name} {help}\n# TYPE {prefix}_{name} {kind}\n");
        for (end, (labels, value)) in &family.samples {
            let label = |(label, value): &(&str, String)| format!("{label}=\"{}\"", escape(value));
            let mut labels = labels.iter().map(label).collect::<Vec<_>>().join(",");
            if !labels.is_empty() {
                labels = format!("{{{labels}}}");
            }
            text += &format!("{prefix}_{name}{end}{labels} {value:?}\n");
        }
    }
    text + "# EOF\n"
}

fn escape(value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    value.replace('\n', "\\n")
}

/// Exact up to 2^53, which no count here reaches.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
pub fn number(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_the_text_of_the_format() {
        let labels = || vec![("pod", "a\"\\\n".to_owned()), ("x", String::new())];
        let families = [
            gauge("late_seconds", "Age", vec![(Vec::new(), 0.5)]),
            counter("claims", "Claims", vec![(labels(), number(3))]),
            gauge("empty", "Nothing", Vec::new()),
            histogram(
                "call_seconds",
                "Duration",
                vec![Histogram {
                    labels: vec![("program", "p".to_owned())],
                    buckets: vec![(0.1, 2), (1.0, 0), (f64::INFINITY, 1)],
                    sum: 7.25,
                }],
            ),
        ];
        let expected = r#"# HELP t_late_seconds Age
# TYPE t_late_seconds gauge
t_late_seconds 0.5
# HELP t_claims Claims
# TYPE t_claims counter
t_claims_total{pod="a\"\\\n",x=""} 3.0
# HELP t_call_seconds Duration
# TYPE t_call_seconds histogram
t_call_seconds_bucket{program="p",le="0.1"} 2.0
t_call_seconds_bucket{program="p",le="1.0"} 2.0
t_call_seconds_bucket{program="p",le="+Inf"} 3.0
t_call_seconds_count{program="p"} 3.0
t_call_seconds_sum{program="p"} 7.25
# EOF
"#;
        assert_eq!(text("t", &families), expected);
    }
}
