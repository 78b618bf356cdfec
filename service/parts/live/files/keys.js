// The API keys that were given in this tab. They are kept for as long as it is open.

const CAN_BE_SENT = /^[\x21-\x7e]+$/; // in a header
const REFUSED = "none"; // sent instead of a key that no header can carry, so that the page asks again

const name = (access) => `inferpool.key.${access}`;

/** The headers that a call of this kind ("metrics", "predict") is sent with. */
export function keyHeaders(access) {
  const key = sessionStorage.getItem(name(access)) ?? sessionStorage.getItem(name("metrics"));
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

export const hasKey = (access) => sessionStorage.getItem(name(access)) !== null;
export const setKey = (access, key) => sessionStorage.setItem(name(access), CAN_BE_SENT.test(key) ? key : REFUSED);
export const forgetKey = (access) => sessionStorage.removeItem(name(access));
