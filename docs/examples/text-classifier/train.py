"""Trains the head on a few sentences of each kind, and writes it. Takes some seconds."""

import torch
from moods import HEAD, LABELS
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import inferpool

TEXTS = {
    "complaint": [
        "The parcel came late and the box was torn.",
        "Nobody answers my mails. I want my money back.",
        "It broke on the first day, which is a disgrace.",
        "The soup was cold and the waiter was rude.",
    ],
    "praise": [
        "Thank you, that was quick and friendly!",
        "Best headphones I have ever had.",
        "The staff were lovely, we will come again.",
        "Works like a charm, I am very happy with it.",
    ],
    "question": [
        "Which sizes do you have in stock?",
        "Can I change the address of my order?",
        "How long is the guarantee?",
        "Do you deliver to Norway?",
    ],
}


def main() -> None:
    """Embed the sentences with inferpool itself, then fit a linear layer to them."""
    texts = [text for label in LABELS for text in TEXTS[label]]
    targets = torch.tensor([LABELS.index(label) for label in LABELS for _ in TEXTS[label]])
    with inferpool.testing.client("minilm_l6", speed="exact") as client:
        vectors = torch.tensor([client.predict(text).value for text in texts])
    torch.manual_seed(1)
    head = nn.Linear(vectors.shape[1], len(LABELS))
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    for _ in range(60):
        functional.cross_entropy(head(vectors), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_file(head.state_dict(), HEAD)


if __name__ == "__main__":
    main()
