//! Rotary positions in config.json: `rope_scaling` of transformers 4, `rope_parameters` of 5.

use serde_json::{Map, Value, json};

use super::config_fields::Fields;
use crate::{Family, ModelError, Rotary, RotaryScaling};

const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";

/// Reads the rotary positions of a model.
pub(super) fn read(
    fields: &Fields<'_>,
    family: Family,
    max_positions: usize,
) -> Result<Rotary, ModelError> {
    let outer_theta = fields.number("rope_theta")?.unwrap_or(10_000.0);
    let outer_share = share(fields, family)?;
    // Phi 3 has this field outside the object, and it overrides the one inside.
    let outer_original = match family {
        Family::Phi3 => Some(fields.size(ORIGINAL)?.unwrap_or(4096)),
        _ => None,
    };
    // transformers 4 writes rope_scaling, and 5 writes rope_parameters. 5 reads both in this order.
    let mut object = None;
    for (name, prefix) in
        [("rope_parameters", "rope_parameters."), ("rope_scaling", "rope_scaling.")]
    {
        match fields.get(name) {
            None => {}
            Some(Value::Object(map)) if map.is_empty() => {}
            Some(Value::Object(map)) => object = Some((map, prefix)),
            Some(value) => return Err(fields.refuse(name, value, "it must be an object")),
        }
    }
    let Some((map, prefix)) = object else {
        let share = outer_share.unwrap_or(1.0);
        return Ok(Rotary { share, ..Rotary::plain(outer_theta) });
    };
    let inner = Fields::new(map, prefix, family);
    let kind = match (inner.text("rope_type")?, inner.text("type")?) {
        (Some(kind), _) | (None, Some(kind)) => kind,
        (None, None) => "default",
    };
    let theta = inner.number("rope_theta")?.unwrap_or(outer_theta);
    let share = share(&inner, family)?.or(outer_share).unwrap_or(1.0);
    let original = || -> Result<usize, ModelError> {
        let own = inner.size(ORIGINAL)?;
        Ok(outer_original.or(own).unwrap_or(max_positions))
    };
    let scaling = match (kind, family) {
        ("default", _) => RotaryScaling::None,
        // Early Phi 3 files use these names for longrope.
        ("longrope", _) | ("su" | "yarn", Family::Phi3) => {
            long_rope(&inner, max_positions, original()?)?
        }
        (other, Family::Phi3) => {
            let advice = "transformers has default and longrope for phi3 models";
            return Err(inner.refuse("rope_type", &Value::from(other), advice));
        }
        ("linear", _) => RotaryScaling::Linear { factor: inner.needed_number("factor")? },
        ("dynamic", _) => {
            // transformers 4 and 5 differ in whether they read this field.
            if let Some(value) =
                inner.get(ORIGINAL).filter(|v| v.as_u64() != Some(max_positions as u64))
            {
                let advice = "for dynamic scaling it must be max_position_embeddings, or left out";
                return Err(inner.refuse(ORIGINAL, value, advice));
            }
            RotaryScaling::Dynamic { factor: inner.needed_number("factor")? }
        }
        ("llama3", _) => RotaryScaling::Llama3 {
            factor: inner.needed_number("factor")?,
            low_freq_factor: inner.needed_number("low_freq_factor")?,
            high_freq_factor: inner.needed_number("high_freq_factor")?,
            original_max_positions: original()?,
        },
        ("yarn", _) => yarn(&inner, max_positions, original()?)?,
        (other, _) => {
            return Err(inner.refuse(
                "rope_type",
                &Value::from(other),
                "STORM supports default, linear, dynamic, llama3, yarn and longrope",
            ));
        }
    };
    inner.refuse_unknown()?;
    Ok(Rotary { theta, share, scaling })
}

/// The part of a head that is rotated. Of these families, `transformers` supports it only in Phi 3.
/// In the others it rotates whole heads or fails, whatever the value.
fn share(fields: &Fields<'_>, family: Family) -> Result<Option<f64>, ModelError> {
    match fields.number(PARTIAL)? {
        Some(share) if share != 1.0 && family != Family::Phi3 => {
            let value = fields.raw(PARTIAL).unwrap_or(&Value::Null);
            let advice = format!(
                "transformers rotates whole heads in {} models: 1.0 only",
                family.model_type()
            );
            Err(fields.refuse(PARTIAL, value, &advice))
        }
        share => Ok(share),
    }
}

/// The factor that transformers uses to divide positions if none is given.
fn implied_factor(
    inner: &Fields<'_>,
    max_positions: usize,
    original: usize,
) -> Result<f64, ModelError> {
    Ok(inner.number("factor")?.unwrap_or(max_positions as f64 / original as f64))
}

fn yarn(
    inner: &Fields<'_>,
    max_positions: usize,
    original: usize,
) -> Result<RotaryScaling, ModelError> {
    let factor = implied_factor(inner, max_positions, original)?;
    // transformers treats zero as absent.
    let number = |field| Ok::<_, ModelError>(inner.number(field)?.filter(|value| *value != 0.0));
    let scale_of = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let implied = match (number("mscale")?, number("mscale_all_dim")?) {
        (Some(scale), Some(of_all)) => scale_of(scale) / scale_of(of_all),
        _ => scale_of(1.0),
    };
    Ok(RotaryScaling::Yarn {
        factor,
        attention_factor: inner.number("attention_factor")?.unwrap_or(implied),
        beta_fast: number("beta_fast")?.unwrap_or(32.0),
        beta_slow: number("beta_slow")?.unwrap_or(1.0),
        truncate: inner.flag("truncate", true)?,
        original_max_positions: original,
    })
}

fn long_rope(
    inner: &Fields<'_>,
    max_positions: usize,
    original: usize,
) -> Result<RotaryScaling, ModelError> {
    let factor = implied_factor(inner, max_positions, original)?;
    let implied = match factor <= 1.0 {
        true => 1.0,
        false => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(RotaryScaling::LongRope {
        short_factors: inner.needed_numbers("short_factor")?,
        long_factors: inner.needed_numbers("long_factor")?,
        attention_factor: inner.number("attention_factor")?.unwrap_or(implied),
        original_max_positions: original,
    })
}

/// Writes the fields of a model to save, with names that transformers 4 and 5 both read.
pub(super) fn write(rotary: &Rotary, family: Family, map: &mut Map<String, Value>) {
    map.insert("rope_theta".into(), json!(rotary.theta));
    if family == Family::Phi3 {
        map.insert(PARTIAL.into(), json!(rotary.share));
    }
    let scaling = match &rotary.scaling {
        RotaryScaling::None => Value::Null,
        RotaryScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RotaryScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
        RotaryScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            ORIGINAL: original_max_positions,
        }),
        RotaryScaling::Yarn {
            factor,
            attention_factor,
            beta_fast,
            beta_slow,
            truncate,
            original_max_positions,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attention_factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "truncate": truncate,
            ORIGINAL: original_max_positions,
        }),
        RotaryScaling::LongRope {
            short_factors,
            long_factors,
            attention_factor,
            original_max_positions,
        } => {
            if family == Family::Phi3 {
                map.insert(ORIGINAL.into(), json!(original_max_positions));
            }
            json!({
                "rope_type": "longrope",
                "short_factor": short_factors,
                "long_factor": long_factors,
                "attention_factor": attention_factor,
                ORIGINAL: original_max_positions,
            })
        }
    };
    map.insert("rope_scaling".into(), scaling);
}
