"""A folder that is copied to the drop prefix is served, without anybody publishing it."""

from __future__ import annotations

from pathlib import Path

import boto3

from tests.integration.stack import Stack


def test_what_is_copied_to_the_drop_prefix_is_served(stack: Stack, published: dict[str, str], artifacts: Path, client) -> None:
    sentence = published[name := sorted(published)[0]]
    folder = artifacts / "adapters" / name
    secret = stack.drop.secret_access_key.get_secret_value() if stack.drop.secret_access_key else None
    keys = {"aws_access_key_id": stack.drop.access_key_id, "aws_secret_access_key": secret, "region_name": stack.drop.region}
    store = boto3.client("s3", endpoint_url=stack.drop.endpoint, **keys)
    bucket, _, prefix = stack.drop.url.removeprefix("s3://").partition("/")
    for file in sorted(folder.iterdir()):
        store.upload_file(str(file), bucket, f"{prefix}/dropped-run/global_step_20/policy/{file.name}")

    stack.wait_until(lambda: stack.get("/v1/models/demo:dropped-run@1"), timeout_s=60)
    answer = client.chat.completions.create(
        model="demo:dropped-run@1", messages=[{"role": "user", "content": "Hello"}], temperature=0, max_tokens=48
    )
    assert answer.model == "demo:dropped-run@1"
    assert answer.choices[0].message.content.strip() == sentence
