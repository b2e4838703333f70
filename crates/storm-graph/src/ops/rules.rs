//! Checks shared by shape rules. Each returns the error message.

use crate::{DType, HeadLayout, Shape, Tensor};

pub(super) type Check = Result<(), String>;

pub(super) fn float(role: &str, tensor: &Tensor) -> Check {
    if tensor.dtype.is_float() {
        Ok(())
    } else {
        Err(format!("`{role}` must be f32 or bf16, not {}", tensor.dtype))
    }
}

/// Checks the dtype of a gradient.
pub(super) fn gradient_dtype(wanted: DType) -> Check {
    if wanted.is_float() { Ok(()) } else { Err(format!("gradients are f32 or bf16, not {wanted}")) }
}

pub(super) fn dtype(role: &str, tensor: &Tensor, wanted: DType) -> Check {
    if tensor.dtype == wanted {
        Ok(())
    } else {
        Err(format!("`{role}` must be {wanted}, not {}", tensor.dtype))
    }
}

pub(super) fn shape(role: &str, tensor: &Tensor, wanted: &Shape) -> Check {
    if tensor.shape == *wanted {
        Ok(())
    } else {
        Err(format!("`{role}` must have shape {wanted}, not {}", tensor.shape))
    }
}

pub(super) fn rank(role: &str, tensor: &Tensor, wanted: usize) -> Check {
    if tensor.shape.rank() == wanted {
        Ok(())
    } else {
        Err(format!("`{role}` must have {wanted} axes, not {}", tensor.shape))
    }
}

pub(super) fn rank_at_least(role: &str, tensor: &Tensor, wanted: usize) -> Check {
    if tensor.shape.rank() >= wanted {
        Ok(())
    } else {
        Err(format!("`{role}` must have at least {wanted} axes, not {}", tensor.shape))
    }
}

/// Checks that a tensor has the shape and dtype of another.
pub(super) fn like(role: &str, tensor: &Tensor, other_role: &str, other: &Tensor) -> Check {
    if tensor.shape == other.shape && tensor.dtype == other.dtype {
        Ok(())
    } else {
        Err(format!("`{role}` must be like `{other_role}`: {} {}", other.dtype, other.shape))
    }
}

/// Checks the shape and dtype of an optional tensor.
pub(super) fn maybe(
    role: &str,
    tensor: Option<&&Tensor>,
    wanted_shape: &Shape,
    wanted_dtype: DType,
) -> Check {
    if let Some(tensor) = tensor {
        shape(role, tensor, wanted_shape)?;
        dtype(role, tensor, wanted_dtype)?;
    }
    Ok(())
}

/// Checks that a tensor is a scalar f32.
pub(super) fn scalar(role: &str, tensor: &Tensor) -> Check {
    shape(role, tensor, &Shape::scalar())?;
    dtype(role, tensor, DType::F32)
}

/// Checks a packed row of heads: (B, T, (Q+2K)·D).
pub(super) fn packed_heads(role: &str, tensor: &Tensor, heads: &HeadLayout) -> Check {
    float(role, tensor)?;
    rank(role, tensor, 3)?;
    let HeadLayout { query_heads, key_value_heads, head_dim } = *heads;
    if query_heads == 0 || key_value_heads == 0 || head_dim == 0 {
        return Err(format!("heads must not be zero: {heads:?}"));
    }
    if query_heads % key_value_heads != 0 {
        return Err(format!(
            "{query_heads} query heads cannot share {key_value_heads} key/value heads evenly"
        ));
    }
    if tensor.shape.width() != heads.qkv_width() {
        return Err(format!(
            "`{role}` must be {} wide for {query_heads} query and {key_value_heads} key/value heads \
             of {head_dim}, not {}",
            heads.qkv_width(),
            tensor.shape.width()
        ));
    }
    Ok(())
}
